"""Arguments of ``from_pretrained`` that are options here: ``model_init_kwargs={"torch_dtype": "bfloat16"}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.config.errors import OptionError, is_placeholder, setting
from alignment.config.fields import keywords

# Keyword argument -> equivalent option.
_OPTIONS = {
    "dtype": "dtype",
    "torch_dtype": "dtype",
    "attn_implementation": "attn_implementation",
    "trust_remote_code": "trust_remote_code",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
}
_PLACES = ("auto", "balanced", "sequential")  # device maps that let the library decide
_DEVICE_MAP = "device_map"
_DEFAULTS = (None, False)


def read_keywords(options: Any) -> None:
    """Set options from ``model_init_kwargs``, and reject conflicts with options and with ``ref_model_init_kwargs``.

    Raises:
        OptionError: an argument conflicts with an option, or with that of the other model.
    """
    for key, value in _said(options, "model_init_kwargs").items():
        name = _OPTIONS[key]
        present = getattr(options, name)
        if present in _DEFAULTS:
            setattr(options, name, value)
        elif value not in (present, *_DEFAULTS):
            raise _contradiction(options, "model_init_kwargs", key, name)
    for key, value in _said(options, "ref_model_init_kwargs").items():
        name = "ref_load_in_4bit" if key == "load_in_4bit" else _OPTIONS[key]
        if name == "ref_load_in_4bit" and options.ref_load_in_4bit is None:
            options.ref_load_in_4bit = value
        elif value not in (getattr(options, name), *_DEFAULTS):
            raise _contradiction(options, "ref_model_init_kwargs", key, name)


def loading_keywords(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the arguments to pass on to ``from_pretrained``: those that are no options and are set."""
    left = {key: value for key, value in keywords(given).items() if key not in _OPTIONS and key != _DEVICE_MAP}
    left = {key: value for key, value in left.items() if not is_placeholder(key, value)}
    return {key: value for key, value in left.items() if value is not None or key != "quantization_config"}


def _said(options: Any, where: str) -> dict[str, Any]:
    """Return the arguments that have an equivalent option, with the values that the option takes."""
    given: Mapping[str, Any] = getattr(options, where) or {}
    if "output_loading_info" in given:
        raise OptionError(f"{setting(where, given)}: output_loading_info is not supported; remove it")
    if not _leaves_placement(given.get(_DEVICE_MAP)):
        raise OptionError(
            f"{setting(where, given)}: DeepSpeed places the model; remove device_map, or set deepspeed: zero3 to "
            "shard it across devices"
        )
    said = {key: given[key] for key in _OPTIONS if given.get(key) is not None}
    for key in ("dtype", "torch_dtype"):
        if key in said:
            said[key] = str(said[key]).removeprefix("torch.")
            if said[key] in ("auto", "float32") and options.bf16 is not False:
                del said[key]  # weights are stored in float32 in any case, whatever the compute dtype
    return said


def _leaves_placement(value: Any) -> bool:
    """Whether a device map places the whole model on this process's device, as the engine does."""
    if value is None or value in _PLACES:
        return True
    return isinstance(value, Mapping) and set(value) == {""} and str(value[""]) not in ("cpu", "disk", "meta")


def _contradiction(options: Any, where: str, key: str, name: str) -> OptionError:
    given = getattr(options, where)
    return OptionError(
        f"{setting(where, given)} and {setting(name, getattr(options, name))}: {key} contradicts the option {name}; "
        f"remove it from {where}"
    )
