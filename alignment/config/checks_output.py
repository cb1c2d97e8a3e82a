"""Checks of the options that say what a run reports, and which of its checkpoints it ends with."""

from __future__ import annotations

from typing import Any

from alignment.config.errors import OptionError
from alignment.config.fields import Strategy, words
from alignment.config.refusals import nearest, shown

# transformers' reporting integrations, except trackio, whose callback reads options of its own; a test compares.
INTEGRATIONS = words(
    "azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab tensorboard wandb"
)


def check_output(options: Any) -> None:
    """Raise :class:`OptionError` for an unknown integration, or a choice of checkpoints that nothing can decide."""
    names = [options.report_to] if isinstance(options.report_to, str) else options.report_to
    for name in names:
        if name not in (*INTEGRATIONS, "all", "none"):
            raise OptionError(
                f"{shown('report_to', name)}: no such integration{nearest(str(name), INTEGRATIONS)}; set one of "
                f"{', '.join(INTEGRATIONS)}, all or none"
            )
    if options.load_best_model_at_end and options.eval_strategy == Strategy.NO:
        raise OptionError(
            "load_best_model_at_end=True: there are no evaluations to choose by; set eval_strategy to steps or epoch"
        )
    chosen_by = options.metric_for_best_model or options.load_best_model_at_end
    if options.greater_is_better is not None and not chosen_by:
        raise OptionError(
            f"{shown('greater_is_better', options.greater_is_better)}: has no effect without metric_for_best_model; "
            "set that too, or leave it out"
        )
