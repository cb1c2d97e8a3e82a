"""Options that exclude each other: one on the command line replaces its counterparts in a recipe."""

from __future__ import annotations

from typing import Any

from alignment.compat.trl.names import value_here
from alignment.config.fields import validated
from alignment.config.options_model import FOUR_BITS, LORA

# Either option of a pair replaces the other one.
_PAIRS = (
    ("max_steps", "num_train_epochs"),
    ("warmup_steps", "warmup_ratio"),
    ("dtype", "bf16"),
    ("dtype", "fp16"),
    ("bf16", "fp16"),
    ("load_in_4bit", "load_in_8bit"),
    ("dataset_name", "dataset_mixture"),
    ("dataset_config", "dataset_mixture"),
    ("train_sampling_strategy", "stratify_labels"),
    ("ref_placement", "precompute_ref_log_probs"),
    ("rollout_backend", "use_transformers_paged"),
    ("resume_from_checkpoint", "overwrite_output_dir"),
    ("simpo_gamma", "gamma_beta_ratio"),
    ("judge", "reward_model_path"),
    ("judge", "reward_funcs"),
)
# Values, besides null and false, that leave the choice to the counterpart.
_UNSET = {
    "max_steps": -1, "dtype": "auto", "rollout_backend": "auto", "train_sampling_strategy": "random",
    "resume_from_checkpoint": "",
}  # fmt: skip


def without_counterparts(cls: type, recipe: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a recipe without those that options on the command line replace.

    An option without a value (null, false, or the value that means so) replaces nothing. An adapter replaces the
    settings of new adapters; without adapters, or without 4-bit weights, their settings are removed.

    Args:
        cls: the options class.
        recipe: options of the recipe by name.
        given: options on the command line by name, as strings.

    Raises:
        OptionError: a value on the command line is of the wrong type.
    """
    values = validated(cls, {name: value_here(name, value) for name, value in given.items()})
    effective = {
        name for name, value in values.items() if not (value is None or value is False or value == _UNSET.get(name))
    }
    replaced = {other for one, two in _PAIRS for name, other in ((one, two), (two, one)) if name in effective}
    if "adapter_name_or_path" in effective or values.get("use_peft") is False:
        replaced |= {*LORA}
    if values.get("load_in_4bit") is False or "load_in_8bit" in effective:
        replaced |= {*FOUR_BITS}
    return {name: value for name, value in recipe.items() if name not in replaced}
