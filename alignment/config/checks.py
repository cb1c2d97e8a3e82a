"""Checks of options and combinations of options that all methods share."""

from __future__ import annotations

from typing import Any

from alignment.config.dtypes import requested_dtype
from alignment.config.errors import OptionError, did_you_mean, listing, refuse, setting
from alignment.config.fields import keywords, words
from alignment.config.options_data import check_mixture, tested_parts
from alignment.config.options_faults import check_faults
from alignment.config.options_model import REF_PLACEMENTS, check_adapters

_RISING = ("linear", "constant_with_warmup")  # schedules that support DeepSpeed's logarithmic warmup
_METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
_SCHEDULES_NEEDING: dict[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
_CHECKPOINT_ARGUMENTS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
_REFERENCE_OPTIONS = (
    "ref_placement", "ref_model_name_or_path", "ref_model_init_kwargs", "ref_deepspeed", "ref_load_in_4bit",
    "ref_adapter_name",
)  # fmt: skip
_ADAM_DEFAULTS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
_OTHERS = ("sgd", "rmsprop", "adafactor")
# Prefixes of the optimizers that ignore each option.
_WITHOUT = {"adam_beta1": _OTHERS, "adam_beta2": _OTHERS, "adam_epsilon": (*_OTHERS, "lion", "paged_lion")}
# transformers' reporting integrations, except trackio, whose callback reads its own options; a test compares the two.
INTEGRATIONS = words(
    "azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab tensorboard wandb"
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
    if not options.output_dir:
        refuse(options, "output_dir", "cannot be empty; set a folder, or remove it to use trainer_output")
    if options.max_steps < 1 and options.max_steps != -1:
        refuse(options, "max_steps", "must be at least 1, or -1 to use num_train_epochs")
    if options.train_sampling_strategy == "sequential" and options.stratify_labels:
        both = "both determine the order of the rows; remove one of them"
        refuse(options, "train_sampling_strategy stratify_labels", both)
    for name, default in _ADAM_DEFAULTS.items():
        if options.optim.startswith(_WITHOUT[name]) and getattr(options, name) != default:
            optim = setting("optim", options.optim)
            refuse(options, name, f"has no effect with {optim}; remove it, or set optim to adamw_torch")
    for key in keywords(options.gradient_checkpointing_kwargs):
        if key not in _CHECKPOINT_ARGUMENTS:
            known = f"{listing(_CHECKPOINT_ARGUMENTS)}{did_you_mean(key, _CHECKPOINT_ARGUMENTS)}"
            why = f"torch's checkpoint function has no argument {key!r}; set one of {known}"
            refuse(options, "gradient_checkpointing_kwargs", why)
    _check_schedule(options)
    requested_dtype(options)
    check_adapters(options)
    check_mixture(options)
    check_faults(options)
    _check_output(options)


def _check_schedule(options: Any) -> None:
    name, kwargs = options.lr_scheduler_type, keywords(options.lr_scheduler_kwargs)
    if options.warmup_ratio and options.warmup_steps:
        refuse(options, "warmup_ratio warmup_steps", "both set the warmup; remove one of them")
    if name in _METRIC_SCHEDULES:
        instead = "set cosine or constant_with_warmup"
        refuse(options, "lr_scheduler_type", f"schedules that depend on a metric are not supported; {instead}")
    needed = _SCHEDULES_NEEDING.get(name)
    if needed and not set(needed) & set(kwargs):
        refuse(options, "lr_scheduler_type", f"requires {' or '.join(needed)}; set it in lr_scheduler_kwargs")
    if kwargs.get("warmup_type") == "log" and name not in _RISING:
        instead = f"remove warmup_type, or set lr_scheduler_type to {' or '.join(_RISING)}"
        refuse(options, "lr_scheduler_kwargs", f"{name} has no logarithmic warmup; {instead}")
    if name == "constant" and (options.warmup_ratio or options.warmup_steps):
        which = "warmup_ratio" if options.warmup_ratio else "warmup_steps"
        instead = "set lr_scheduler_type to constant_with_warmup"
        refuse(options, which, f"has no effect with lr_scheduler_type='constant'; {instead}")


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


def _check_output(options: Any) -> None:
    names = [options.report_to] if isinstance(options.report_to, str) else options.report_to
    for name in names:
        if name not in (*INTEGRATIONS, "all", "none"):
            near = did_you_mean(str(name), INTEGRATIONS)
            known = f"{listing(INTEGRATIONS)}, all or none{near}"
            raise OptionError(f"{setting('report_to', name)}: unknown integration; set one of {known}")
    for name, asked in (("load_best_model_at_end", True), ("save_strategy", "best")):
        if getattr(options, name) == asked and options.eval_strategy == "no":
            refuse(options, name, "requires evaluations; set eval_strategy to steps or epoch")
    if options.overwrite_output_dir and options.resume_from_checkpoint:
        why = "they contradict each other: a restart would move its own checkpoints away; remove one of them"
        refuse(options, "resume_from_checkpoint overwrite_output_dir", why)
    if options.greater_is_better is not None and options.metric_for_best_model is None:
        refuse(options, "greater_is_better", "has no effect without metric_for_best_model; set both, or remove it")
