"""Checks of options and combinations of options that all methods share."""

from __future__ import annotations

from typing import Any

from alignment.config.dtypes import requested_dtype
from alignment.config.errors import OptionError, did_you_mean, setting
from alignment.config.fields import SaveStrategy, Strategy, words
from alignment.config.options_data import SequenceOptions, check_mixture, tested_parts
from alignment.config.options_faults import check_faults
from alignment.config.options_model import REF_PLACEMENTS, check_adapters

# transformers' SchedulerType; a test compares the two.
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "reduce_lr_on_plateau",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
    "greedy",
)
_RISING = ("linear", "constant_with_warmup")  # schedules that support DeepSpeed's logarithmic warmup
_METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
_SCHEDULES_NEEDING: dict[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
_CHECKPOINT_ARGUMENTS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
_REFERENCE_OPTIONS = (
    "ref_model_name_or_path", "ref_model_init_kwargs", "ref_deepspeed", "ref_load_in_4bit", "ref_adapter_name",
)  # fmt: skip
_LARGEST_SEED = 2**32 - 1  # limit of NumPy's generator
_ADAM_DEFAULTS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
_OTHERS = ("sgd", "rmsprop", "adafactor")
# Prefixes of the optimizers that ignore each option.
_WITHOUT = {"adam_beta1": _OTHERS, "adam_beta2": _OTHERS, "adam_epsilon": (*_OTHERS, "lion", "paged_lion")}
# transformers' reporting integrations, except trackio, whose callback reads its own options; a test compares the two.
INTEGRATIONS = words(
    "azure_ml clearml codecarbon comet_ml dagshub dvclive flyte kubeflow mlflow neptune swanlab tensorboard wandb"
)


def at_least(options: Any, least: float, *names: str) -> None:
    """Require that each of these options is unset or at least ``least``."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise OptionError(f"{setting(name, value)}: must be at least {least}")


def positive(options: Any, *names: str) -> None:
    """Require that each of these options is greater than 0."""
    for name in names:
        if not getattr(options, name) > 0:
            raise OptionError(f"{setting(name, getattr(options, name))}: must be greater than 0")


def below_one(options: Any, *names: str) -> None:
    """Require that each of these options is in [0, 1)."""
    for name in names:
        if not 0 <= getattr(options, name) < 1:
            raise OptionError(f"{setting(name, getattr(options, name))}: must be at least 0 and less than 1")


def need_reference(options: Any, method: str, *, known_rows: bool = True) -> None:
    """Require that the placement of the reference is one that the method supports.

    Args:
        options: options of the run; ``precompute_ref_log_probs`` is translated to ``ref_placement``.
        method: name of the method, for messages.
        known_rows: whether the rows to score are known before training.
    """
    possible = [name for name in REF_PLACEMENTS if name != "none" and (known_rows or name != "precomputed")]
    if getattr(options, "precompute_ref_log_probs", False):
        if options.ref_placement not in (None, "precomputed"):
            raise OptionError(
                f"precompute_ref_log_probs=True and {setting('ref_placement', options.ref_placement)} contradict "
                "each other; remove one of them"
            )
        options.ref_placement = "precomputed"
    if options.ref_placement == "none":
        raise OptionError(
            f"{setting('ref_placement', 'none')}: {method} requires a reference; set one of {', '.join(possible)}"
        )
    if options.ref_placement == "precomputed" and not known_rows:
        raise OptionError(
            f"{setting('ref_placement', 'precomputed')}: {method} scores completions that are generated during "
            f"training; set one of {', '.join(possible)}"
        )
    if getattr(options, "precompute_ref_batch_size", None) is not None:
        at_least(options, 1, "precompute_ref_batch_size")
        if options.ref_placement != "precomputed":
            raise OptionError(
                f"{setting('precompute_ref_batch_size', options.precompute_ref_batch_size)}: has no effect without "
                "ref_placement: precomputed; remove it"
            )


def refuse_labels(options: Any, method: str) -> None:
    """Reject options about labels for a method (named in messages) whose rows have none."""
    if options.stratify_labels:
        raise OptionError(f"stratify_labels=True: the rows of {method} have no labels; remove it")


def refuse_reference(options: Any, method: str) -> None:
    """Reject options about a reference model or labels for a method (named in messages) that has neither."""
    if options.ref_placement not in (None, "none"):
        raise OptionError(
            f"{setting('ref_placement', options.ref_placement)}: {method} does not use a reference model; remove it"
        )
    for name in _REFERENCE_OPTIONS:
        if getattr(options, name) is not None:
            raise OptionError(
                f"{setting(name, getattr(options, name))}: {method} does not use a reference model; remove it"
            )
    refuse_labels(options, method)


def check_shared(options: Any) -> None:
    """Check all options that do not depend on the method. Raises :class:`OptionError` for the first invalid one."""
    if not options.output_dir:
        raise OptionError("output_dir='': cannot be empty; set a folder, or remove it to use trainer_output")
    _check_ranges(options)
    _check_steps(options)
    _check_order(options)
    _check_optimizer(options)
    _check_schedule(options)
    requested_dtype(options)
    _check_checkpointing(options)
    check_adapters(options)
    check_mixture(options)
    check_faults(options)
    check_output(options)


def _check_checkpointing(options: Any) -> None:
    given = options.gradient_checkpointing_kwargs
    for key in given or ():
        if key not in _CHECKPOINT_ARGUMENTS:
            raise OptionError(
                f"{setting('gradient_checkpointing_kwargs', given)}: torch's checkpoint function has no argument "
                f"{key!r}; set one of {', '.join(_CHECKPOINT_ARGUMENTS)}{did_you_mean(key, _CHECKPOINT_ARGUMENTS)}"
            )


def _check_order(options: Any) -> None:
    if options.train_sampling_strategy == "sequential" and options.stratify_labels:
        raise OptionError(
            "train_sampling_strategy='sequential' and stratify_labels=True both determine the order of the rows; "
            "remove one of them"
        )


def _check_ranges(options: Any) -> None:
    at_least(options, 1, "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    at_least(options, 1, "save_total_limit", "dataset_num_proc")
    at_least(options, 1, "max_train_samples", "max_eval_samples")
    at_least(options, 0, "dataloader_num_workers", "learning_rate", "weight_decay", "max_grad_norm")
    at_least(options, 0, "router_aux_loss_coef", "seed", "data_seed")
    if options.seed > _LARGEST_SEED:
        raise OptionError(f"{setting('seed', options.seed)}: must be at most {_LARGEST_SEED}")
    below_one(options, "adam_beta1", "adam_beta2")
    positive(options, "adam_epsilon")
    at_least(options, 1, "max_bad_steps")
    at_least(options, 0, "retries", "retry_pause")
    positive(options, "hang_timeout", "hang_timeout_first", "hang_factor", "peer_timeout")
    at_least(options, 5, "peer_timeout")  # heartbeats come twice a second, unless the GIL or the network delays them


def _check_steps(options: Any) -> None:
    if options.max_steps != -1 and options.max_steps < 1:
        raise OptionError(
            f"{setting('max_steps', options.max_steps)}: must be at least 1, or -1 to use num_train_epochs"
        )
    positive(options, "num_train_epochs")
    at_least(options, 0, "warmup_steps", "eval_delay")
    for name in ("logging_steps", "save_steps", "eval_steps"):
        if getattr(options, name) == 0:
            raise OptionError(f"{name}=0: must be at least 1, or a fraction of all steps, greater than 0")
    for name in ("logging_steps", "save_steps", "eval_steps", "warmup_steps"):
        _whole_or_share(options, name)
    below_one(options, "warmup_ratio")
    if options.warmup_ratio and options.warmup_steps:
        raise OptionError(
            f"{setting('warmup_ratio', options.warmup_ratio)} and {setting('warmup_steps', options.warmup_steps)} "
            f"both set the warmup; remove one of them"
        )


def _whole_or_share(options: Any, name: str) -> None:
    """Require a number of steps to be an integer, to which it is converted, or a fraction of all steps in [0, 1)."""
    value = getattr(options, name)
    if value is None or 0 < value < 1:
        return
    if value < 0 or value != int(value):
        raise OptionError(
            f"{setting(name, value)}: expected an integer number of optimizer steps, or a fraction of all steps "
            "less than 1"
        )
    setattr(options, name, int(value))


def _check_optimizer(options: Any) -> None:
    """Reject options of Adam with an optimizer that ignores them."""
    for name, default in _ADAM_DEFAULTS.items():
        if options.optim.startswith(_WITHOUT[name]) and getattr(options, name) != default:
            raise OptionError(
                f"{setting(name, getattr(options, name))}: has no effect with {setting('optim', options.optim)}; "
                f"remove it, or set optim to adamw_torch"
            )


def _check_schedule(options: Any) -> None:
    name = options.lr_scheduler_type
    if name not in SCHEDULES:
        raise OptionError(
            f"{setting('lr_scheduler_type', name)}: expected one of {', '.join(SCHEDULES)}"
            f"{did_you_mean(name, SCHEDULES)}"
        )
    if name in _METRIC_SCHEDULES:
        raise OptionError(
            f"{setting('lr_scheduler_type', name)}: schedules that depend on a metric are not supported; set cosine "
            f"or constant_with_warmup"
        )
    needed = _SCHEDULES_NEEDING.get(name)
    if needed and not set(needed) & set(options.lr_scheduler_kwargs or {}):
        raise OptionError(
            f"{setting('lr_scheduler_type', name)}: requires {' or '.join(needed)}; set it in lr_scheduler_kwargs"
        )
    if (options.lr_scheduler_kwargs or {}).get("warmup_type") == "log" and name not in _RISING:
        raise OptionError(
            f"{setting('lr_scheduler_kwargs', options.lr_scheduler_kwargs)}: {name} has no logarithmic warmup; remove "
            f"warmup_type, or set lr_scheduler_type to {' or '.join(_RISING)}"
        )
    if name == "constant" and (options.warmup_ratio or options.warmup_steps):
        which = "warmup_ratio" if options.warmup_ratio else "warmup_steps"
        raise OptionError(
            f"{setting(which, getattr(options, which))}: has no effect with lr_scheduler_type='constant'; "
            f"set lr_scheduler_type to constant_with_warmup"
        )


def check_lengths(options: Any, rows_per_unit: int) -> None:
    """Check lengths in tokens. ``rows_per_unit``: sequences that must share a micro-batch (2 for a pair)."""
    at_least(options, 2, "max_length")
    at_least(options, 1, "max_prompt_length", "max_completion_length")
    if isinstance(options, SequenceOptions):
        at_least(options, 1, "num_completions_to_log", "max_new_tokens")
    if options.max_length is None or options.max_tokens_per_batch is None:
        return
    least = rows_per_unit * options.max_length
    if options.max_tokens_per_batch < least:
        what = "a row" if rows_per_unit == 1 else "a pair"
        raise OptionError(
            f"{setting('max_tokens_per_batch', options.max_tokens_per_batch)}: too small for {what} with "
            f"{setting('max_length', options.max_length)}; set at least {least}"
        )


def check_command_line(options: Any) -> None:
    """Require the options that a script may pass as objects instead: model and dataset."""
    if not options.model_name_or_path:
        raise OptionError("model_name_or_path is required; set it to a folder or Hub name")
    if not options.dataset_name and options.dataset_mixture is None:
        raise OptionError("dataset_name is required; set it to a file, folder or Hub name")
    options.check_named()
    wanted = options.eval_strategy != Strategy.NO or options.eval_on_start
    if wanted and not options.dataset_test_split and not tested_parts(options):
        which = "eval_on_start" if options.eval_on_start else "eval_strategy"
        raise OptionError(
            f"{setting(which, getattr(options, which))}: no evaluation dataset; set dataset_test_split, or set "
            f"eval_strategy to no"
        )


def check_output(options: Any) -> None:
    """Raise :class:`OptionError` for an unknown integration, or for inconsistent options about the best checkpoint."""
    names = [options.report_to] if isinstance(options.report_to, str) else options.report_to
    for name in names:
        if name not in (*INTEGRATIONS, "all", "none"):
            raise OptionError(
                f"{setting('report_to', name)}: unknown integration; set one of {', '.join(INTEGRATIONS)}, all or none"
                f"{did_you_mean(str(name), INTEGRATIONS)}"
            )
    if options.load_best_model_at_end and options.eval_strategy == Strategy.NO:
        raise OptionError("load_best_model_at_end=True: requires evaluations; set eval_strategy to steps or epoch")
    if options.save_strategy == SaveStrategy.BEST and options.eval_strategy == Strategy.NO:
        raise OptionError("save_strategy='best': requires evaluations; set eval_strategy to steps or epoch")
    if options.overwrite_output_dir and options.resume_from_checkpoint:
        raise OptionError(
            f"{setting('resume_from_checkpoint', options.resume_from_checkpoint)} and overwrite_output_dir=True "
            "contradict each other: a restart would move its own checkpoints away; remove one of them"
        )
    chosen_by = (
        options.metric_for_best_model or options.load_best_model_at_end or options.save_strategy == SaveStrategy.BEST
    )
    if options.greater_is_better is not None and not chosen_by:
        raise OptionError(
            f"{setting('greater_is_better', options.greater_is_better)}: has no effect without metric_for_best_model; "
            "set both, or remove it"
        )
