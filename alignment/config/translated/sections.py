"""Translation of the sections ``optimizer`` and ``scheduler`` of a DeepSpeed JSON to options.

The training loop has its own optimizer and schedule, whose states are part of its checkpoints. A section determines
their type and values. As in transformers' integration, "auto" stands for the value of the option. Other values set an
option that is at its default, and are rejected if they contradict an option.
"""

from __future__ import annotations

from typing import Any

from alignment.config.deepspeed import LoadedConfig, load_deepspeed_config, source_of
from alignment.config.errors import OptionError, did_you_mean, setting
from alignment.config.fields import parse_optim_args, words
from alignment.config.translated.taking import AUTO, contradiction, default_of, said, take

SECTIONS = ("optimizer", "scheduler")
_ADAMW = words("adamw_torch adamw_torch_fused deepspeed_fused_adam deepspeed_cpu_adam")
# DeepSpeed's types in lower case, and the equivalent values of optim, of which the first is the default.
_OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adam": _ADAMW,
    "adamw": _ADAMW,
    "fusedadam": ("deepspeed_fused_adam",),
    "cpuadam": ("deepspeed_cpu_adam",),
    "sgd": ("sgd",),
    "rmsprop": ("rmsprop",),
    "lion": words("lion_32bit paged_lion_32bit"),
}
_SCHEDULES = {"warmuplr": "constant_with_warmup", "warmupdecaylr": "linear"}
_NEAREST = {
    "warmupcosinelr": 'lr_scheduler_type: cosine_with_min_lr with lr_scheduler_kwargs: {"min_lr_rate": 0.0001}',
}
_MOVED = {"lr": "learning_rate", "weight_decay": "weight_decay"}  # parameters of all optimizers
_ARGUMENTS = {
    "sgd": words("momentum dampening nesterov"),
    "rmsprop": words("alpha eps momentum centered"),
    "adam": words("amsgrad"),
    "adamw": words("amsgrad"),
}
# Parameters that have no effect with these values; None: with any value.
_NEUTRAL: dict[str, bool | None] = {
    "torch_adam": None, "fused": None, "foreach": None, "set_grad_none": None, "bias_correction": True,
    "amsgrad": False, "fp32_optimizer_states": True,
}  # fmt: skip
_SPOKEN_OF = {
    "optimizer": ("optim", "learning_rate", "weight_decay", "optim_args"),
    "scheduler": ("lr_scheduler_type", "learning_rate", "warmup_steps", "warmup_ratio", "lr_scheduler_kwargs"),
}
_LEAST_WARMUP = 2  # DeepSpeed's minimum


def translate(options: Any) -> None:
    """Set options from the sections of ``options.deepspeed``. Idempotent.

    Raises:
        OptionError: a type or parameter is not supported, or contradicts an option.
    """
    if options.deepspeed is not None:
        config = load_deepspeed_config(options.deepspeed, "")
        _translate(options, config, source_of(config))


def has_optimizer(deepspeed: Any) -> bool:
    """Whether the DeepSpeed JSON has an ``optimizer`` section; if so, weight decay applies to biases and norms too.

    transformers' Trainer passes all trainable parameters to such an optimizer in a single group.
    """
    return deepspeed is not None and load_deepspeed_config(deepspeed, "").get("optimizer") is not None


def notes(options: Any) -> list[str]:
    """Return a line for the start of a run for each section that says which options it has set."""
    config = {} if options.deepspeed is None else load_deepspeed_config(options.deepspeed, "")
    found = []
    for name, spoken_of in _SPOKEN_OF.items():
        if config.get(name) is not None:
            means = ", ".join(setting(option, getattr(options, option)) for option in spoken_of)
            found.append(f"{source_of(config)}: {name} {config[name]['type']} sets {means}")
    return found


def without_sections(config: LoadedConfig) -> LoadedConfig:
    """Return the JSON for DeepSpeed without the sections, from which it would build its own optimizer."""
    rest = {name: value for name, value in config.items() if name not in SECTIONS}
    return LoadedConfig(rest, config.source)


def _translate(options: Any, config: dict[str, Any], where: str) -> None:
    for name, translate_one in zip(SECTIONS, (_translate_optimizer, _translate_schedule), strict=True):
        section = config.get(name)
        if section is not None:
            kind, parameters = _read(name, section, where)
            translate_one(options, kind, parameters, f"{where}: {name}")


def _read(name: str, section: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Return the type and the parameters of a section."""
    if not isinstance(section, dict) or not isinstance(section.get("type"), str):
        raise OptionError(f'{where}: {setting(name, section)}: expected a mapping with "type" and "params"')
    for key, value in section.items():
        if key not in ("type", "params"):
            raise OptionError(f"{where}: {said(f'{name}.{key}', value)}: not supported; remove it")
    parameters = section.get("params") or {}
    if not isinstance(parameters, dict):
        raise OptionError(f"{where}: {setting(f'{name}.params', parameters)}: expected a mapping")
    return section["type"], parameters


def _unknown_type(place: str, kind: str, known: tuple[str, ...]) -> OptionError:
    nearest = _NEAREST.get(kind.lower())
    instead = f"set {nearest}" if nearest else f"set one of {', '.join(known)}"
    return OptionError(
        f"{said(f'{place}.type', kind)}: not supported; remove the section, or {instead}{did_you_mean(kind, known)}"
    )


def _translate_optimizer(options: Any, kind: str, parameters: dict[str, Any], place: str) -> None:
    known = kind.lower()
    if known not in _OPTIMIZERS:
        raise _unknown_type(place, kind, ("AdamW", "Adam", "Lion", "RMSprop", "SGD"))
    same = _OPTIMIZERS[known]
    if options.optim not in same:
        if options.optim != default_of(options, "optim"):
            raise contradiction(options, "optim", f"{place}.type", kind)
        options.optim = same[0]
    if "lr" not in parameters:
        raise _missing(place, "lr", "learning_rate")
    for key, value in parameters.items():
        _translate_parameter(options, known, key, value, f"{place}.params.{key}")
    _check_decay(options, known, parameters, place)


def _missing(place: str, key: str, option: str) -> OptionError:
    return OptionError(
        f'{place}.params: {key} is missing, for which DeepSpeed has its own default; write "{key}": "auto" to use the '
        f"option {option}"
    )


def _translate_parameter(options: Any, kind: str, key: str, value: Any, place: str) -> None:
    """Translate a parameter of the optimizer; adam_w_mode is checked once all parameters are known."""
    adam = kind not in ("sgd", "rmsprop", "lion")
    if key in _MOVED:
        _take(options, _MOVED[key], place, value)
    elif adam and key == "eps":
        _take(options, "adam_epsilon", place, value)
    elif (adam or kind == "lion") and key == "betas":
        if value == AUTO:
            return
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise OptionError(f"{said(place, value)}: expected a list of two numbers")
        for name, part in zip(("adam_beta1", "adam_beta2"), value, strict=True):
            take(options, name, place, part)
    elif key in _NEUTRAL and _NEUTRAL[key] in (None, value):
        return
    elif key in _ARGUMENTS.get(kind, ()) and value != AUTO:
        _add_argument(options, key, value, place)
    elif key != "adam_w_mode" or not adam:
        raise OptionError(f"{said(place, value)}: not supported; remove it")


def _take(options: Any, name: str, place: str, value: Any) -> None:
    if value != AUTO:
        take(options, name, place, value)


def _add_argument(options: Any, key: str, value: Any, place: str) -> None:
    given = parse_optim_args(options.optim_args)
    if given.get(key, value) != value:
        raise contradiction(options, "optim_args", place, value)
    options.optim_args = given | {key: value}


def _check_decay(options: Any, kind: str, parameters: dict[str, Any], place: str) -> None:
    """Reject L2 regularization: DeepSpeed's Adam decouples the weight decay unless adam_w_mode is false."""
    if kind == "adam" and parameters.get("adam_w_mode", True) is not True and options.weight_decay:
        raise OptionError(
            f"{place}.params.adam_w_mode={parameters['adam_w_mode']!r}: with "
            f"{setting('weight_decay', options.weight_decay)}, the decay would be added to the gradient, which is not "
            "supported; set adam_w_mode to true, or weight_decay to 0"
        )


def _translate_schedule(options: Any, kind: str, parameters: dict[str, Any], place: str) -> None:
    known = kind.lower()
    if known not in _SCHEDULES:
        raise _unknown_type(place, kind, ("WarmupLR", "WarmupDecayLR"))
    schedule, default = _SCHEDULES[known], default_of(options, "lr_scheduler_type")
    if options.lr_scheduler_type not in (schedule, default):
        raise contradiction(options, "lr_scheduler_type", f"{place}.type", kind)
    options.lr_scheduler_type = schedule
    readers = {
        "warmup_min_lr": _check_least,
        "warmup_max_lr": _take_rate,
        "warmup_num_steps": _take_warmup,
        "warmup_type": _check_warmup_type,
    }
    if known == "warmupdecaylr":
        readers["total_num_steps"] = _check_length
        for key in ("total_num_steps", "warmup_max_lr"):
            if key not in parameters:
                raise _missing(place, key, "learning_rate" if key == "warmup_max_lr" else "max_steps")
    if "warmup_num_steps" not in parameters:
        raise _missing(place, "warmup_num_steps", "warmup_steps")
    for key, value in parameters.items():
        if key not in readers:
            raise OptionError(
                f"{said(f'{place}.params.{key}', value)}: {kind} has no such parameter"
                f"{did_you_mean(key, readers) or '; remove it'}"
            )
        if value != AUTO:
            readers[key](options, f"{place}.params.{key}", value)
    _take_shape(options, parameters.get("warmup_type", "log"), f"{place}.params.warmup_type")


def _check_least(options: Any, place: str, value: Any) -> None:
    if value != 0:
        raise OptionError(f"{said(place, value)}: the warmup always starts at 0; set 0")


def _take_rate(options: Any, place: str, value: Any) -> None:
    take(options, "learning_rate", place, value)


def _take_warmup(options: Any, place: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{said(place, value)}: expected an integer number of steps, at least 1")
    if options.warmup_ratio:
        raise contradiction(options, "warmup_ratio", place, value)
    take(options, "warmup_steps", place, max(value, _LEAST_WARMUP))


def _check_warmup_type(options: Any, place: str, value: Any) -> None:
    if value not in ("log", "linear"):
        raise OptionError(f"{said(place, value)}: expected log or linear")


def _check_length(options: Any, place: str, value: Any) -> None:
    if value != options.max_steps:
        raise OptionError(
            f"{said(place, value)}: the number of steps is set by {setting('max_steps', options.max_steps)}"
            f'{"" if options.max_steps > 0 else " (num_train_epochs)"}; write "auto"'
        )


def _take_shape(options: Any, shape: str, place: str) -> None:
    """Set the shape of the warmup, which is logarithmic by default in DeepSpeed and linear in transformers."""
    if shape != "log" or not (options.warmup_steps or options.warmup_ratio):
        return
    given = dict(options.lr_scheduler_kwargs or {})
    if given.get("warmup_type", shape) != shape:
        raise contradiction(options, "lr_scheduler_kwargs", place, shape)
    options.lr_scheduler_kwargs = given | {"warmup_type": shape}
