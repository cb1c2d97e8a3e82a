"""Checks of options and combinations of options that all methods share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alignment.config.dtypes import requested_dtype
from alignment.config.errors import OptionError, did_you_mean, listing, refuse, setting
from alignment.config.fields import keywords, words
from alignment.config.options_data import check_mixture, tested_parts
from alignment.config.options_faults import FaultOptions
from alignment.config.options_model import REF_PLACEMENTS, check_adapters

_RISING = ("linear", "constant_with_warmup")  # schedules that support DeepSpeed's logarithmic warmup
_SCHEDULES_NEEDING: dict[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
_CHECKPOINT_ARGUMENTS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
_REFERENCE_OPTIONS = words(
    "ref_placement ref_model_name_or_path ref_model_init_kwargs ref_deepspeed ref_load_in_4bit ref_adapter_name"
)
_OTHERS = ("sgd", "rmsprop", "adafactor")
# The defaults of options that some optimizers ignore, and the prefixes of these optimizers.
_ADAM = {
    "adam_beta1": (0.9, _OTHERS),
    "adam_beta2": (0.999, _OTHERS),
    "adam_epsilon": (1e-8, (*_OTHERS, "lion", "paged_lion")),
}
# transformers' reporting integrations, except trackio, whose callback reads its own options; a test compares the two.
INTEGRATIONS = words(
    "azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab tensorboard wandb"
)
_NOT_EVALUATED = "requires evaluations; set eval_strategy to steps or epoch"
_CONSTANT = "has no effect with lr_scheduler_type='constant'; set lr_scheduler_type to constant_with_warmup"
# Combinations that are refused: the options to name, when, and why.
_REFUSED: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("output_dir", lambda of: not of.output_dir, "cannot be empty; set a folder, or remove it to use trainer_output"),
    ("max_steps", lambda of: of.max_steps < 1 and of.max_steps != -1, "must be at least 1, or -1 to use epochs"),
    (
        "train_sampling_strategy stratify_labels",
        lambda of: of.train_sampling_strategy == "sequential" and of.stratify_labels,
        "both determine the order of the rows; remove one of them",
    ),
    ("warmup_ratio warmup_steps", lambda of: of.warmup_ratio and of.warmup_steps, "both set it; remove one of them"),
    ("warmup_ratio", lambda of: of.lr_scheduler_type == "constant" and of.warmup_ratio, _CONSTANT),
    ("warmup_steps", lambda of: of.lr_scheduler_type == "constant" and of.warmup_steps, _CONSTANT),
    ("load_best_model_at_end", lambda of: of.load_best_model_at_end and of.eval_strategy == "no", _NOT_EVALUATED),
    ("save_strategy", lambda of: of.save_strategy == "best" and of.eval_strategy == "no", _NOT_EVALUATED),
    (
        "resume_from_checkpoint overwrite_output_dir",
        lambda of: of.overwrite_output_dir and of.resume_from_checkpoint,
        "they contradict each other: a restart would move its own checkpoints away; remove one of them",
    ),
    (
        "greater_is_better",
        lambda of: of.greater_is_better is not None and of.metric_for_best_model is None,
        "has no effect without metric_for_best_model; set both, or remove it",
    ),
    (
        "hang_timeout_first hang_timeout",
        lambda of: FaultOptions.hang_timeout_first != of.hang_timeout_first < of.hang_timeout,
        "the first must be at least the second, which applies to every phase; lower hang_timeout as well",
    ),
    (
        "retry_pause",
        lambda of: of.retry_pause not in (0, FaultOptions.retry_pause) and not of.retries,
        "has no effect with retries=0; remove it",
    ),
    (
        "max_bad_steps",
        lambda of: of.max_bad_steps != FaultOptions.max_bad_steps and of.on_bad_step == "stop",
        "has no effect with on_bad_step='stop'; remove it, or set on_bad_step: skip",
    ),
)


def resolve_reference(options: Any) -> None:
    """Translate ``precompute_ref_log_probs`` to ``ref_placement``.

    Raises:
        OptionError: the two contradict each other.
    """
    if options.precompute_ref_log_probs:
        if options.ref_placement not in (None, "precomputed"):
            refuse(options, "precompute_ref_log_probs ref_placement", "they contradict each other; remove one of them")
        options.ref_placement = "precomputed"


def need_reference(options: Any, method: str, *, known_rows: bool = True) -> None:
    """Require that the placement of the reference is one that the method supports.

    Args:
        options: options of the run.
        method: name of the method, for messages.
        known_rows: whether the rows to score are known before training.
    """
    impossible = {"none": "requires a reference"}
    if not known_rows:
        impossible["precomputed"] = "scores completions that are generated during training"
    if why := impossible.get(options.ref_placement):
        possible = [name for name in REF_PLACEMENTS if name not in impossible]
        refuse(options, "ref_placement", f"{method} {why}; set one of {listing(possible)}")
    if getattr(options, "precompute_ref_batch_size", None) is not None and options.ref_placement != "precomputed":
        refuse(options, "precompute_ref_batch_size", "has no effect without ref_placement: precomputed; remove it")


def refuse_labels(options: Any, method: str) -> None:
    """Reject options about labels for a method (named in messages) whose rows have none."""
    if options.stratify_labels:
        refuse(options, "stratify_labels", f"the rows of {method} have no labels; remove it")


def refuse_reference(options: Any, method: str) -> None:
    """Reject options about a reference model or labels for a method (named in messages) that has neither."""
    for name in _REFERENCE_OPTIONS:
        if getattr(options, name) not in (None, "none"):
            refuse(options, name, f"{method} does not use a reference model; remove it")
    refuse_labels(options, method)


def check_shared(options: Any) -> None:
    """Check combinations that do not depend on the method. Raises :class:`OptionError` for the first invalid one."""
    for names, found, why in _REFUSED:
        if found(options):
            refuse(options, names, why)
    for name, (default, optimizers) in _ADAM.items():
        if options.optim.startswith(optimizers) and getattr(options, name) != default:
            optim = setting("optim", options.optim)
            refuse(options, name, f"has no effect with {optim}; remove it, or set optim to adamw_torch")
    for key in keywords(options.gradient_checkpointing_kwargs):
        if key not in _CHECKPOINT_ARGUMENTS:
            known = f"{listing(_CHECKPOINT_ARGUMENTS)}{did_you_mean(key, _CHECKPOINT_ARGUMENTS)}"
            refuse(options, "gradient_checkpointing_kwargs", f"torch has no argument {key!r}; set one of {known}")
    schedule, kwargs = options.lr_scheduler_type, keywords(options.lr_scheduler_kwargs)
    needed = _SCHEDULES_NEEDING.get(schedule)
    if needed and not set(needed) & set(kwargs):
        refuse(options, "lr_scheduler_type", f"requires {' or '.join(needed)}; set it in lr_scheduler_kwargs")
    if kwargs.get("warmup_type") == "log" and schedule not in _RISING:
        instead = f"remove warmup_type, or set lr_scheduler_type to {' or '.join(_RISING)}"
        refuse(options, "lr_scheduler_kwargs", f"{schedule} has no logarithmic warmup; {instead}")
    for name in [options.report_to] if isinstance(options.report_to, str) else options.report_to:
        if name not in (*INTEGRATIONS, "all", "none"):
            known = f"{listing(INTEGRATIONS)}, all or none{did_you_mean(name, INTEGRATIONS)}"
            raise OptionError(f"{setting('report_to', name)}: unknown integration; set one of {known}")
    requested_dtype(options)
    check_adapters(options)
    check_mixture(options)


def check_lengths(options: Any, rows_per_unit: int) -> None:
    """Check lengths in tokens. ``rows_per_unit``: sequences that must share a micro-batch (2 for a pair)."""
    if options.max_length is None or options.max_tokens_per_batch is None:
        return
    least = rows_per_unit * options.max_length
    if options.max_tokens_per_batch < least:
        what, length = "a row" if rows_per_unit == 1 else "a pair", setting("max_length", options.max_length)
        refuse(options, "max_tokens_per_batch", f"too small for {what} with {length}; set at least {least}")


def check_command_line(options: Any) -> None:
    """Require the options that a script may pass as objects instead: model and dataset."""
    if not options.model_name_or_path:
        raise OptionError("model_name_or_path is required; set it to a folder or Hub name")
    if not options.dataset_name and options.dataset_mixture is None:
        raise OptionError("dataset_name is required; set it to a file, folder or Hub name")
    options.check_named()
    wanted = options.eval_strategy != "no" or options.eval_on_start
    if wanted and not options.dataset_test_split and not tested_parts(options):
        which = "eval_on_start" if options.eval_on_start else "eval_strategy"
        refuse(options, which, "no evaluation dataset; set dataset_test_split, or set eval_strategy to no")
