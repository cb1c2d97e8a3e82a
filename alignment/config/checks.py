"""Checks of options and combinations of options that all methods share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alignment.compat.trl.names import value_here
from alignment.config.dtypes import requested_dtype
from alignment.config.errors import OptionError, listing, refuse, setting
from alignment.config.fields import validated, words
from alignment.config.options_data import check_column_map, mixture_parts, tested_parts
from alignment.config.options_model import FOUR_BITS, LORA, REF_PLACEMENTS, changed
from alignment.config.options_training import FaultOptions

_NO_ADAM = ("sgd", "rmsprop", "adafactor")
_NO_EPSILON = (*_NO_ADAM, "lion", "paged_lion")
_FOUR_BIT_MODELS = ("load_in_4bit", "ref_load_in_4bit", "reward_load_in_4bit")
# Options that have an effect in some situations only: when they have, and what to set.
_EFFECTIVE: tuple[tuple[tuple[str, ...], Callable[[Any], Any], str], ...] = (
    (("warmup_ratio", "warmup_steps"), lambda of: of.lr_scheduler_type != "constant", "another lr_scheduler_type"),
    (("adam_beta1", "adam_beta2"), lambda of: not of.optim.startswith(_NO_ADAM), "optim: adamw_torch"),
    (("adam_epsilon",), lambda of: not of.optim.startswith(_NO_EPSILON), "optim: adamw_torch"),
    (("greater_is_better",), lambda of: of.metric_for_best_model is not None, "metric_for_best_model"),
    (("early_stopping_threshold",), lambda of: of.early_stopping_patience is not None, "early_stopping_patience"),
    (("save_steps",), lambda of: of.save_strategy != "epoch", "save_strategy: steps"),
    (("max_bad_steps",), lambda of: of.on_bad_step == "skip", "on_bad_step: skip"),
    (("retry_pause",), lambda of: of.retries or not of.retry_pause, "retries"),
    (("precompute_ref_batch_size",), lambda of: of.ref_placement == "precomputed", "ref_placement: precomputed"),
    (LORA, lambda of: of.use_peft, "use_peft: true"),
    (FOUR_BITS, lambda of: any(getattr(of, name, False) for name in _FOUR_BIT_MODELS), "load_in_4bit: true"),
    (
        ("bnb_4bit_skip_experts",),
        lambda of: any(
            [getattr(of, name, False) for name in _FOUR_BIT_MODELS]
            + ["quantization_config" in (of.model_init_kwargs or {})]
        ),
        "load_in_4bit: true",
    ),
)
_NOT_EVALUATED = "requires evaluations; set eval_strategy to steps or epoch"
_CONTRADICT = "they contradict each other; remove one of them"
# Combinations that are refused: the options to name, when, and why.
_REFUSED: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("output_dir", lambda of: not of.output_dir, "cannot be empty; set a folder, or remove it to use trainer_output"),
    ("max_steps", lambda of: of.max_steps < 1 and of.max_steps != -1, "must be at least 1, or -1 to use epochs"),
    (
        "train_sampling_strategy stratify_labels",
        lambda of: of.train_sampling_strategy == "sequential" and of.stratify_labels,
        _CONTRADICT,
    ),
    ("dataset_name dataset_mixture", lambda of: of.dataset_name and of.dataset_mixture is not None, _CONTRADICT),
    ("dataset_config dataset_mixture", lambda of: of.dataset_config and of.dataset_mixture is not None, _CONTRADICT),
    ("warmup_ratio warmup_steps", lambda of: of.warmup_ratio and of.warmup_steps, "both set it; remove one of them"),
    ("load_in_4bit load_in_8bit", lambda of: of.load_in_4bit and of.load_in_8bit, _CONTRADICT),
    ("padding_free pack", lambda of: of.padding_free and of.pack == "false", _CONTRADICT),
    (
        "auto_find_batch_size memory_rehearsal",
        lambda of: of.auto_find_batch_size and of.memory_rehearsal == "false",
        "micro-batches are found in the rehearsal; remove one of them",
    ),
    (
        "activation_offloading gradient_checkpointing",
        lambda of: of.activation_offloading and not of.gradient_checkpointing,
        "only hidden states of recomputed layers are offloaded; remove one of them",
    ),
    (
        "pack attn_implementation",
        lambda of: of.pack == "true" and of.attn_implementation in ("eager", "flex_attention"),
        "packing has an attention function of its own; remove one of them",
    ),
    ("load_best_model_at_end", lambda of: of.load_best_model_at_end and of.eval_strategy == "no", _NOT_EVALUATED),
    ("early_stopping_patience", lambda of: of.early_stopping_patience and of.eval_strategy == "no", _NOT_EVALUATED),
    ("save_strategy", lambda of: of.save_strategy == "best" and of.eval_strategy == "no", _NOT_EVALUATED),
    (
        "resume_from_checkpoint overwrite_output_dir",
        lambda of: of.overwrite_output_dir and of.resume_from_checkpoint,
        "a restart would move its own checkpoints away; remove one of them",
    ),
    (
        "hang_timeout_first hang_timeout",
        lambda of: FaultOptions.hang_timeout_first != of.hang_timeout_first < of.hang_timeout,
        "the first must be at least the second, which applies to every phase; lower hang_timeout as well",
    ),
)
# Options that exclude each other: either one on the command line replaces the other one in a recipe.
_COUNTERPARTS = {
    "max_steps": "num_train_epochs", "warmup_steps": "warmup_ratio", "dtype": "bf16 fp16", "bf16": "fp16",
    "load_in_4bit": "load_in_8bit", "dataset_mixture": "dataset_name dataset_config",
    "train_sampling_strategy": "stratify_labels", "ref_placement": "precompute_ref_log_probs",
    "rollout_backend": "use_transformers_paged use_vllm", "resume_from_checkpoint": "overwrite_output_dir",
    "simpo_gamma": "gamma_beta_ratio", "judge": "reward_model_path reward_funcs",
}  # fmt: skip
_UNSET = words("-1 none false auto random") + ("",)  # values that leave the choice to the counterpart


def resolve_reference(options: Any) -> None:
    """Translate ``precompute_ref_log_probs`` to ``ref_placement``. Raises :class:`OptionError` if they differ."""
    if options.precompute_ref_log_probs:
        if options.ref_placement not in (None, "precomputed"):
            refuse(options, "precompute_ref_log_probs ref_placement", _CONTRADICT)
        options.ref_placement = "precomputed"


def need_reference(options: Any, method: str, *, known_rows: bool = True) -> None:
    """Require that the placement of the reference is one that the method (named in messages) supports.

    ``known_rows`` tells whether the rows to score are known before training.
    """
    impossible = {"none": "requires a reference"}
    if not known_rows:
        impossible["precomputed"] = "scores completions that are generated during training"
    if why := impossible.get(options.ref_placement):
        possible = [name for name in REF_PLACEMENTS if name not in impossible]
        refuse(options, "ref_placement", f"{method} {why}; set one of {listing(possible)}")


def refuse_labels(options: Any, method: str) -> None:
    """Reject options about labels for a method (named in messages) whose rows have none."""
    parts = [] if options.dataset_mixture is None else mixture_parts(options.dataset_mixture)
    for of, name in ((options, "stratify_labels"), *((each, "label_map") for each in (options, *parts))):
        if getattr(of, name):
            refuse(of, name, f"the rows of {method} have no labels; remove it")


def refuse_reference(options: Any, method: str) -> None:
    """Reject options about a reference model or labels for a method (named in messages) that has neither."""
    for name in words("placement model_name_or_path model_init_kwargs deepspeed load_in_4bit adapter_name"):
        if getattr(options, f"ref_{name}") not in (None, "none"):
            refuse(options, f"ref_{name}", f"{method} does not use a reference model; remove it")
    refuse_labels(options, method)


def check_shared(options: Any) -> None:
    """Check combinations that do not depend on the method. Raises :class:`OptionError` for the first invalid one."""
    for names, found, why in _REFUSED:
        if found(options):
            refuse(options, names, why)
    if options.adapter_name_or_path is not None and (name := changed(options, LORA)):
        path = setting("adapter_name_or_path", options.adapter_name_or_path)
        refuse(options, name, f"has no effect with {path}, which has its own settings; remove it")
    for group, effective, instead in _EFFECTIVE:
        if not effective(options) and (name := changed(options, group)):
            refuse(options, name, f"has no effect here; remove it, or set {instead}")
    requested_dtype(options)
    check_column_map("column_map", options.column_map)
    if options.dataset_mixture is not None:
        mixture_parts(options.dataset_mixture)


def check_lengths(options: Any, rows_per_unit: int, packed: int | None = None) -> None:
    """Check lengths in tokens before any data is read.

    Args:
        options: the options.
        rows_per_unit: sequences that must share a micro-batch (2 for a pair).
        packed: their tokens if they share a prompt; None for those of the longest one, as the rest depends on rows.
    """
    if options.max_length is None or options.max_tokens_per_batch is None:
        return
    least = rows_per_unit * options.max_length if options.pack == "false" else packed or options.max_length
    if options.max_tokens_per_batch < least:
        what, length = "a pair" if least > options.max_length else "a row", setting("max_length", options.max_length)
        refuse(options, "max_tokens_per_batch", f"too small for {what} with {length}; set at least {least}")


def without_counterparts(cls: Any, recipe: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe without those that options on the command line, ``given``, replace.

    A value that means unset replaces nothing. An adapter replaces the settings of new adapters; without adapters, or
    without 4-bit weights, their settings are removed.
    """
    values = validated(cls, {name: value_here(name, value) for name, value in given.items()})
    texts = {name: str(value).lower() for name, value in values.items()}
    effective = {name for name, text in texts.items() if text not in _UNSET}
    pairs = [(one, other) for one, others in _COUNTERPARTS.items() for other in others.split()]
    replaced = {two for one, two in pairs if one in effective} | {one for one, two in pairs if two in effective}
    if "adapter_name_or_path" in effective or texts.get("use_peft") == "false":
        replaced |= {*LORA}
    if texts.get("load_in_4bit") == "false" or "load_in_8bit" in effective:
        replaced |= {*FOUR_BITS, "bnb_4bit_skip_experts"}
    return {name: value for name, value in recipe.items() if name not in replaced}


def check_command_line(options: Any, *, data: bool = True) -> None:
    """Require the options that a script may pass as objects instead: model and, unless ``data`` is false, dataset."""
    if not options.model_name_or_path:
        raise OptionError("model_name_or_path is required; set it to a folder or Hub name")
    if data and not options.dataset_name and options.dataset_mixture is None:
        raise OptionError("dataset_name is required; set it to a file, folder or Hub name")
    options.check_named()
    wanted = data and (options.eval_strategy != "no" or options.eval_on_start)
    if wanted and not options.dataset_test_split and not tested_parts(options):
        which = "eval_on_start" if options.eval_on_start else "eval_strategy"
        refuse(options, which, "no evaluation dataset; set dataset_test_split, or set eval_strategy to no")
