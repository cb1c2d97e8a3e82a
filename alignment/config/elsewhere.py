"""Settings outside the options that would configure the run: they must agree with the options.

These are the sections ``optimizer`` and ``scheduler`` of a DeepSpeed JSON, and the environment variables that
``accelerate launch`` sets. The training loop has its own optimizer and schedule, and the options select both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from alignment.config.deepspeed import LoadedConfig, load_deepspeed_config, source_of
from alignment.config.deepspeed_keys import value_at
from alignment.config.dtypes import SHORT, compute_dtype, uses_cuda
from alignment.config.errors import OptionError, setting
from alignment.config.fields import keywords, parse_optim_args, words

_ADAMW = words("adamw_torch adamw_torch_fused deepspeed_fused_adam deepspeed_cpu_adam")
# The options that take the place of a section, by its type in lower case: values of optim and of lr_scheduler_type.
_SECTIONS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "optimizer": ("optim", {
        "adam": _ADAMW, "adamw": _ADAMW, "fusedadam": _ADAMW[2:3], "cpuadam": _ADAMW[3:], "sgd": ("sgd",),
        "rmsprop": ("rmsprop",), "lion": ("lion_32bit", "paged_lion_32bit"),
    }),
    "scheduler": ("lr_scheduler_type", {"warmuplr": ("constant_with_warmup",), "warmupdecaylr": ("linear",)}),
}  # fmt: skip
_PARAMETERS = {  # the options of parameters of both sections
    "lr": ("learning_rate",), "weight_decay": ("weight_decay",), "eps": ("adam_epsilon",),
    "betas": ("adam_beta1", "adam_beta2"), "warmup_max_lr": ("learning_rate",), "warmup_num_steps": ("warmup_steps",),
    "total_num_steps": ("max_steps",),
}  # fmt: skip
_LAUNCHED = words("ACCELERATE_CONFIG_DS_FIELDS ACCELERATE_DYNAMO_BACKEND")  # the launcher always sets one of them


def check_elsewhere(options: Any) -> None:
    """Refuse settings of a DeepSpeed JSON and of ``accelerate launch`` that differ from the options.

    Raises:
        OptionError: naming the setting and the option to set.
    """
    config = {} if options.deepspeed is None else load_deepspeed_config(options.deepspeed, "")
    settings = [
        (f"{source_of(config)}: {name}{place}", value, option, own)
        for name in _SECTIONS
        if config.get(name) is not None
        for place, value, option, own in _of_section(options, name, config[name])
    ]
    if any(name in os.environ for name in _LAUNCHED):  # libraries set some of the variables, too
        settings += _of_accelerate(options)
    for place, value, option, own in settings:
        # The environment has texts, in which 1 and 1.0 are the same number.
        same = value == own or str(value).lower().removesuffix(".0") == str(own).lower().removesuffix(".0")
        if not same and "auto" not in (value, own):
            raise OptionError(
                f"{place}{setting('', value)} does not agree with the option {option}, which gives {own!r}; set the "
                "option to agree with it, or remove the setting"
            )


def has_optimizer(deepspeed: Any) -> bool:
    """Whether the DeepSpeed JSON has an ``optimizer`` section; if so, weight decay applies to biases and norms too.

    transformers' Trainer passes all trainable parameters to such an optimizer in a single group.
    """
    return deepspeed is not None and load_deepspeed_config(deepspeed, "").get("optimizer") is not None


def without_sections(config: LoadedConfig) -> LoadedConfig:
    """Return the JSON for DeepSpeed without the sections, from which it would build its own optimizer."""
    return LoadedConfig({name: value for name, value in config.items() if name not in _SECTIONS}, config.source)


def _of_section(options: Any, name: str, section: Any) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield the type and the parameters of a section: place, value, option, and the option's value."""
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), dict):
        raise OptionError(f'deepspeed: {setting(name, section)}: expected a mapping of "type" and "params"')
    option, kinds = _SECTIONS[name]
    given, own = section.get("type"), getattr(options, option)
    yield ".type", given, option, given if own in kinds.get(str(given).lower(), ()) else own
    # Parameters that are not given have values of DeepSpeed's own.
    if name == "optimizer":
        rest, further, params = "optim_args", parse_optim_args(options.optim_args), dict[str, Any](lr=None)
    else:
        further = {"warmup_min_lr": 0, "warmup_type": "linear", **keywords(options.lr_scheduler_kwargs)}
        warms_up = options.warmup_steps or options.warmup_ratio
        rest, params = "lr_scheduler_kwargs", {"warmup_max_lr": None, "warmup_num_steps": None}
        params["warmup_type"] = "log" if warms_up else "auto"
    for key, value in (params | section.get("params", {})).items():
        names = _PARAMETERS.get(key, ())
        values = [getattr(options, each) for each in names] or [further.get(key)]
        value = list(value) if isinstance(value, tuple) else value
        yield f".params.{key}", value, " and ".join(names) or rest, values if names[1:] else values[0]


def _of_accelerate(options: Any) -> list[tuple[str, Any, str, Any]]:
    """Return the settings of ``accelerate launch`` in the same form."""
    said = {name[11:]: text for name, text in os.environ.items() if name.startswith("ACCELERATE_")}
    said = {name: text for name, text in said.items() if text.lower() not in ("", "no", "none", "auto", "false")}
    config, file = load_deepspeed_config(options.deepspeed, "zero2"), said.get("DEEPSPEED_CONFIG_FILE")
    own = {
        **dict.fromkeys(words("USE_FSDP USE_MEGATRON_LM USE_PARALLELISM_CONFIG DYNAMO_BACKEND"), ("deepspeed", None)),
        "USE_CPU": ("use_cpu", not uses_cuda(options)),
        "MIXED_PRECISION": ("bf16 or fp16", SHORT[compute_dtype(options)]),
        "GRADIENT_ACCUMULATION_STEPS": ("gradient_accumulation_steps", options.gradient_accumulation_steps),
        "GRADIENT_CLIPPING": ("max_grad_norm", options.max_grad_norm),
        "DEEPSPEED_CONFIG_FILE": ("deepspeed", file and load_deepspeed_config(file, "") == config and file),
        "DEEPSPEED_ZERO_STAGE": ("deepspeed", value_at(config, "zero_optimization.stage")),
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (
            "deepspeed",
            value_at(config, "zero_optimization.offload_optimizer.device"),
        ),
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("deepspeed", value_at(config, "zero_optimization.offload_param.device")),
    }
    return [(f"accelerate launch: ACCELERATE_{name}", said[name], *own[name]) for name in own.keys() & said.keys()]
