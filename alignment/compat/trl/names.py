"""Aliases of options, and values of TRL and transformers that are written differently here."""

from __future__ import annotations

from typing import Any

from alignment.config.errors import OptionError, setting
from alignment.config.fields import once_per_class, option_fields

# Values of TRL or transformers -> values here. None: no value.
_VALUES: dict[str, dict[Any, Any]] = {
    "disable_tqdm": {None: False},
    "report_to": {None: "none"},
    "gradient_checkpointing": {None: False},  # as in TrainingArguments
    "top_k": {None: 0, -1: 0},
    "save_total_limit": {0: None, -1: None},  # no limit
    "max_grad_norm": {None: 0.0},
    "include_num_input_tokens_seen": {"no": False, "non_padding": True, "all": True},  # padding is never counted
    "optim": {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"},
    "fsdp": {(): None, False: None},
    "debug": {(): ""},
}


@once_per_class
def older_names(cls: Any) -> dict[str, str]:
    """Return the aliases of a class's options: older name -> name here."""
    return {alias.lstrip("-"): each.name for each in option_fields(cls) for alias in each.metadata.get("aliases", ())}


def read_names(cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Replace aliases by the names of the options.

    Raises:
        OptionError: an option is set to different values under two names.
    """
    result = dict(given)
    for older, name in older_names(cls).items():
        if older not in given:
            continue
        value = result.pop(older)
        if value is None and name in result:
            continue  # an older name that a release of TRL still lists, at its default
        if name in result and str(result[name]).lower() != str(value).lower():
            both = f"{setting(older, value)} and {setting(name, result[name])}"
            raise OptionError(f"{both} contradict each other: {older} is an alias of {name}; remove {older}")
        result[name] = value
    return result


def value_here(name: str, value: Any) -> Any:
    """Return a value of TRL or transformers as it is written here."""
    key = tuple(value) if isinstance(value, list) else value
    if name not in _VALUES or not isinstance(key, (str, int, tuple, type(None))):
        return value
    for each, here in _VALUES[name].items():
        if (each == key and type(each) is type(key)) or (type(each) is int and key == str(each)):
            return here
    return value
