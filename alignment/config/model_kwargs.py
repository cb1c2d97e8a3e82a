"""Arguments of ``from_pretrained`` that are options here: ``model_init_kwargs={"torch_dtype": "bfloat16"}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.config.errors import OptionError, is_placeholder, setting
from alignment.config.fields import keywords, words

# Keyword arguments with the equivalent option.
_OPTIONS = {name: name for name in words("dtype attn_implementation trust_remote_code load_in_4bit load_in_8bit")}
_OPTIONS["torch_dtype"] = "dtype"


def read_keywords(options: Any) -> None:
    """Set options from ``model_init_kwargs``, and reject conflicts with options and with ``ref_model_init_kwargs``.

    Raises:
        OptionError: an argument conflicts with an option, or with that of the other model.
    """
    for where in ("model_init_kwargs", "ref_model_init_kwargs"):
        given: Mapping[str, Any] = getattr(options, where) or {}
        own = where == "model_init_kwargs"
        if any(place in str(given.get("device_map")) for place in ("cpu", "disk", "meta")):
            instead = "remove device_map, or set deepspeed: zero3 to shard it across devices"
            raise OptionError(f"{setting(where, given)}: DeepSpeed places the model; {instead}")
        for key in (key for key in _OPTIONS if given.get(key) is not None):
            name = _OPTIONS[key] if own or key != "load_in_4bit" else "ref_load_in_4bit"
            value, present = given[key], getattr(options, name)
            if name == "dtype":
                value = str(value).removeprefix("torch.")
                if value in ("auto", "float32") and options.bf16 is not False:
                    continue  # weights are stored in float32 in any case, whatever the compute dtype
            if (own and present in (None, False)) or (name == "ref_load_in_4bit" and present is None):
                setattr(options, name, value)
            elif value not in (present, False):
                both = f"{setting(where, given)} and {setting(name, present)}"
                raise OptionError(f"{both}: {key} contradicts the option {name}; remove it from {where}")


def loading_keywords(given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the arguments to pass on to ``from_pretrained``: those that are no options and are set."""
    left = {key: value for key, value in keywords(given).items() if key not in (*_OPTIONS, "device_map")}
    if left.get("quantization_config", ...) is None:
        del left["quantization_config"]
    return {key: value for key, value in left.items() if not is_placeholder(key, value)}
