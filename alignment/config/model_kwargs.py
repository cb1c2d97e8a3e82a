"""Arguments of ``from_pretrained`` that are options here: ``model_init_kwargs={"torch_dtype": "bfloat16"}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.config.errors import OptionError, is_placeholder, setting
from alignment.config.fields import keywords, words

# Keyword arguments with the equivalent option.
_OPTIONS = {name: name for name in words("dtype attn_implementation trust_remote_code load_in_4bit load_in_8bit")}
_OPTIONS["torch_dtype"] = "dtype"
_DEVICE_MAP = "device_map"
_DEFAULTS = (None, False)


def read_keywords(options: Any) -> None:
    """Set options from ``model_init_kwargs``, and reject conflicts with options and with ``ref_model_init_kwargs``.

    Raises:
        OptionError: an argument conflicts with an option, or with that of the other model.
    """
    for where in ("model_init_kwargs", "ref_model_init_kwargs"):
        for key, value in _said(options, where).items():
            own = where == "model_init_kwargs"
            name = _OPTIONS[key] if own or key != "load_in_4bit" else "ref_load_in_4bit"
            present = getattr(options, name)
            if (own and present in _DEFAULTS) or (name == "ref_load_in_4bit" and present is None):
                setattr(options, name, value)
            elif value not in (present, *_DEFAULTS):
                raise OptionError(
                    f"{setting(where, getattr(options, where))} and {setting(name, present)}: {key} contradicts the "
                    f"option {name}; remove it from {where}"
                )


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
    placed = given.get(_DEVICE_MAP)
    whole = isinstance(placed, Mapping) and {*placed} == {""} and str(placed[""]) not in ("cpu", "disk", "meta")
    if placed not in (None, "auto", "balanced", "sequential") and not whole:  # on this process's device
        raise OptionError(
            f"{setting(where, given)}: DeepSpeed places the model; remove device_map, or set deepspeed: zero3 to "
            "shard it across devices"
        )
    said = {key: given[key] for key in _OPTIONS if given.get(key) is not None}
    for key in said.keys() & {"dtype", "torch_dtype"}:
        said[key] = str(said[key]).removeprefix("torch.")
        if said[key] in ("auto", "float32") and options.bf16 is not False:
            del said[key]  # weights are stored in float32 in any case, whatever the compute dtype
    return said
