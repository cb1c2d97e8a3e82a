"""Names and values that options have elsewhere, and what they are here."""

from __future__ import annotations

import functools
from typing import Any

from alignment.config.errors import OptionError, setting
from alignment.config.fields import convert, hints, option_fields

# Values that TRL or transformers have for an option, as they are written here. None: what is meant by no value.
_VALUES: dict[str, dict[Any, Any]] = {
    "disable_tqdm": {None: False},
    "report_to": {None: "none"},
    "gradient_checkpointing": {None: False},  # so does TrainingArguments
    "top_k": {None: 0, -1: 0},
    "save_total_limit": {0: None, -1: None},  # no limit
    "max_grad_norm": {None: 0.0},
    # Sequences are counted without their padding.
    "include_num_input_tokens_seen": {"no": False, "non_padding": True, "all": True},
    "optim": {"adamw_hf": "adamw_torch", "adamw_apex_fused": "adamw_torch_fused"},
    "fsdp": {(): None, False: None},
    "debug": {(): ""},
}


def older_names(cls: Any) -> dict[str, str]:
    """Older name -> name here, of the options of a class."""
    return _older_names(cls)


@functools.cache
def _older_names(cls: Any) -> dict[str, str]:
    return {
        alias.lstrip("-"): field.name for field in option_fields(cls) for alias in field.metadata.get("aliases", ())
    }


def read_names(cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Options by the names that they have here.

    Raises:
        OptionError: one is there under two names, with different values.
    """
    result = dict(given)
    for older, name in older_names(cls).items():
        if older not in given:
            continue
        value = result.pop(older)
        if value is None and name in result:
            continue  # an older name that a release still lists, left at its default
        if name in result and not _agree(cls, name, result[name], value):
            raise OptionError(
                f"{setting(older, value)} and {setting(name, result[name])}: they are one option under two names; "
                f"leave {older} out"
            )
        result[name] = value
    return result


def _agree(cls: Any, name: str, one: Any, other: Any) -> bool:
    hint = hints(cls)[name]
    return bool(convert(name, value_here(name, one), hint) == convert(name, value_here(name, other), hint))


def value_here(name: str, value: Any) -> Any:
    """A value as it is written here."""
    known = _VALUES.get(name)
    key = tuple(value) if isinstance(value, list) else value
    if known is None or not isinstance(key, (str, int, tuple, type(None))):
        return value
    for each, here in known.items():
        if (each == key and type(each) is type(key)) or (type(each) is int and key == str(each)):
            return here
    return value
