"""Settings outside the options that would configure the run: they must agree with the options.

These are the sections ``optimizer`` and ``scheduler`` of a DeepSpeed JSON, and the environment variables that
``accelerate launch`` sets. The training loop has its own optimizer and schedule, and the options select both.
"""

from __future__ import annotations

import os
from typing import Any

from alignment.config.deepspeed import LoadedConfig, load_deepspeed_config, source_of
from alignment.config.deepspeed_keys import value_at
from alignment.config.dtypes import SHORT, compute_dtype, uses_cuda
from alignment.config.errors import OptionError, setting
from alignment.config.fields import keywords, parse_optim_args, words

_ADAMW = words("adamw_torch adamw_torch_fused deepspeed_fused_adam deepspeed_cpu_adam")
_KINDS: dict[str, dict[str, tuple[str, ...]]] = {  # the values of optim and of lr_scheduler_type by type in lower case
    "optimizer": {
        "adam": _ADAMW, "adamw": _ADAMW, "fusedadam": _ADAMW[2:3], "cpuadam": _ADAMW[3:], "sgd": ("sgd",),
        "rmsprop": ("rmsprop",), "lion": ("lion_32bit", "paged_lion_32bit"),
    },
    "scheduler": {"warmuplr": ("constant_with_warmup",), "warmupdecaylr": ("linear",)},
}  # fmt: skip
_PARAMETERS = {  # the options of parameters of both sections
    "lr": ("learning_rate",), "weight_decay": ("weight_decay",), "eps": ("adam_epsilon",),
    "betas": ("adam_beta1", "adam_beta2"), "warmup_max_lr": ("learning_rate",), "warmup_num_steps": ("warmup_steps",),
    "total_num_steps": ("max_steps",),
}  # fmt: skip
_REQUIRED = {"optimizer": words("lr"), "scheduler": words("warmup_max_lr warmup_num_steps")}  # DeepSpeed has defaults
_LAUNCHED = words("ACCELERATE_CONFIG_DS_FIELDS ACCELERATE_DYNAMO_BACKEND")  # the launcher always sets one of them
_NO_ENGINES = ("USE_FSDP", "USE_MEGATRON_LM", "USE_PARALLELISM_CONFIG", "DYNAMO_BACKEND")
_JSON = {
    "DEEPSPEED_ZERO_STAGE": "zero_optimization.stage",
    "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "zero_optimization.offload_optimizer.device",
    "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "zero_optimization.offload_param.device",
}


def check_elsewhere(options: Any) -> None:
    """Refuse settings of a DeepSpeed JSON and of ``accelerate launch`` that differ from the options.

    Raises:
        OptionError: naming the setting and the option to set.
    """
    config = {} if options.deepspeed is None else load_deepspeed_config(options.deepspeed, "")
    for name in _KINDS:
        if config.get(name) is not None:
            _check_section(options, name, config[name], f"{source_of(config)}: {name}")
    if any(name in os.environ for name in _LAUNCHED):  # libraries set some of the variables, too
        _check_accelerate(options)


def has_optimizer(deepspeed: Any) -> bool:
    """Whether the DeepSpeed JSON has an ``optimizer`` section; if so, weight decay applies to biases and norms too.

    transformers' Trainer passes all trainable parameters to such an optimizer in a single group.
    """
    return deepspeed is not None and load_deepspeed_config(deepspeed, "").get("optimizer") is not None


def without_sections(config: LoadedConfig) -> LoadedConfig:
    """Return the JSON for DeepSpeed without the sections, from which it would build its own optimizer."""
    return LoadedConfig({name: value for name, value in config.items() if name not in _KINDS}, config.source)


def _check_section(options: Any, name: str, section: Any, place: str) -> None:
    if not isinstance(section, dict) or not isinstance(section.get("params", {}), dict):
        raise OptionError(f'{place}: {setting(name, section)}: expected a mapping of "type" and "params"')
    option = "optim" if name == "optimizer" else "lr_scheduler_type"
    same, parameters = _KINDS[name].get(str(section.get("type")).lower(), ()), section.get("params", {})
    if getattr(options, option) not in same:
        instead = f"set {option}: {same[0]}, or remove the section" if same else "remove the section"
        raise _disagrees(options, option, f"{place}.type", section.get("type"), instead)
    further = parse_optim_args(options.optim_args) if option == "optim" else keywords(options.lr_scheduler_kwargs)
    shape = {"warmup_type": "log"} if option != "optim" and (options.warmup_steps or options.warmup_ratio) else {}
    for key, value in {**dict.fromkeys(_REQUIRED[name]), **shape, **parameters}.items():
        own = [getattr(options, each) for each in _PARAMETERS.get(key, ())] or [further.get(key)]
        if own == [None]:
            own = [{"warmup_type": "linear", "warmup_min_lr": 0}.get(key)]
        if value != "auto" and (list(value) if isinstance(value, (list, tuple)) else [value]) != own:
            where = " and ".join(_PARAMETERS.get(key, ("optim_args" if option == "optim" else "lr_scheduler_kwargs",)))
            raise OptionError(
                f"{place}.params.{key}{setting('', value)} does not agree with the option {where}, which gives "
                f'{", ".join(map(repr, own))}; set {where}, and write "{key}": "auto", or remove the section'
            )


def _disagrees(options: Any, option: str, place: str, value: Any, instead: str) -> OptionError:
    own = setting(option, getattr(options, option))
    return OptionError(f"{place}{setting('', value)} does not agree with the option {own}; {instead}")


def _check_accelerate(options: Any) -> None:
    """Refuse settings of ``accelerate launch`` that ask for another engine or another run than the options do."""
    prefix, unset = "ACCELERATE_", ("", "no", "none", "auto", "false")
    said = {name.removeprefix(prefix): text for name, text in os.environ.items() if name.startswith(prefix)}
    said = {name: text for name, text in said.items() if text.lower() not in unset}
    for name in said.keys() & {*_NO_ENGINES}:
        raise OptionError(f"{setting(prefix + name, said[name])} (accelerate launch): not supported; set deepspeed")
    # Setting, its value here, the option that decides it, and what to set.
    own: list[tuple[str, Any, str, str]] = [("USE_CPU", not uses_cuda(options), "use_cpu", "use_cpu: true")]
    if "MIXED_PRECISION" in said:
        text = said["MIXED_PRECISION"].lower()
        option = text if text in ("bf16", "fp16") else "bf16"
        own.append(("MIXED_PRECISION", SHORT[compute_dtype(options)], option, f"{option}: true"))
    if "USE_DEEPSPEED" in said:
        config, file = load_deepspeed_config(options.deepspeed, "zero2"), said.get("DEEPSPEED_CONFIG_FILE")
        if file is not None and load_deepspeed_config(file, "") != config:
            raise _disagrees(
                options, "deepspeed", prefix + "DEEPSPEED_CONFIG_FILE", file, "set deepspeed to this file"
            )
        for name, path in _JSON.items():
            own.append(
                (name, value_at(config, path), "deepspeed", f"deepspeed to a JSON with {path}={said.get(name)}")
            )
        for name, option in {"GRADIENT_ACCUMULATION_STEPS": "", "GRADIENT_CLIPPING": "max_grad_norm"}.items():
            option = option or name.lower()
            own.append((name, getattr(options, option), option, f"{option}: {said.get(name)}"))
    for name, value, option, instead in own:
        if name in said and value != "auto" and not _same(said[name], value):
            raise _disagrees(options, option, f"accelerate launch: {prefix}{name}", said[name], f"set {instead}")


def _same(text: str, value: Any) -> bool:
    try:
        return float(text) == value
    except ValueError:
        return text.lower() == str(value).lower()
