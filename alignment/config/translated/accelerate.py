"""Translation of the settings of ``accelerate launch``, which it passes in environment variables, to options.

``accelerate launch --config_file zero3.yaml`` requests ZeRO-3, and a run must not silently use another stage. The
variables are read only if Accelerate's launcher has started this process, as libraries also set some of them.
"""

from __future__ import annotations

import os
from typing import Any

from alignment.config.deepspeed import LoadedConfig, load_deepspeed_config
from alignment.config.deepspeed_keys import set_at, value_at
from alignment.config.dtypes import BF16, FP16, requested_dtype
from alignment.config.errors import OptionError, setting
from alignment.config.translated.taking import contradiction

_LAUNCHED = ("ACCELERATE_CONFIG_DS_FIELDS", "ACCELERATE_DYNAMO_BACKEND")  # the launcher always sets one of them
_DEEPSPEED, _FILE = "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE"
_PRECISION, _CPU = "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"
_ENGINE = "only DeepSpeed is supported; use deepspeed_config in Accelerate's file, or remove it and set deepspeed"
_REFUSED = {
    "ACCELERATE_USE_FSDP": _ENGINE,
    "ACCELERATE_USE_MEGATRON_LM": _ENGINE,
    "ACCELERATE_USE_PARALLELISM_CONFIG": "only data parallelism is supported; remove parallelism_config",
}
_STAGE = "zero_optimization.stage"
# The path of a variable's value in a DeepSpeed JSON.
_PATHS = {
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": _STAGE,
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "zero_optimization.offload_optimizer.device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "zero_optimization.offload_param.device",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "gradient_clipping",
}


def launched() -> bool:
    """Whether Accelerate's launcher has started this process."""
    return any(name in os.environ for name in _LAUNCHED)


def translate(options: Any) -> None:
    """Set options from the settings of Accelerate's launcher. Idempotent.

    Raises:
        OptionError: a setting is not supported, or contradicts an option.
    """
    if not launched():
        return
    for name, reason in _REFUSED.items():
        if _is_true(name):
            raise OptionError(f"{setting(name, os.environ[name])} (accelerate launch): {reason}")
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        raise OptionError(
            f"{setting('ACCELERATE_DYNAMO_BACKEND', backend)} (accelerate launch): torch.compile is not supported; "
            "remove dynamo_backend"
        )
    if _is_true(_CPU):
        options.use_cpu = True
    _take_precision(options)
    if _is_true(_DEEPSPEED):
        _take_engine(options)


def notes(options: Any) -> list[str]:
    """Return a line for the start of a run that says which options the launcher's settings have set."""
    if not launched():
        return []
    told = {name: os.environ[name] for name in (_FILE, *_PATHS) if os.environ.get(name, "none").lower() != "none"}
    told = {name: value for name, value in told.items() if value not in ("auto", "")} if _is_true(_DEEPSPEED) else {}
    if os.environ.get(_PRECISION, "no").lower() != "no":
        told[_PRECISION] = os.environ[_PRECISION]
    if _is_true(_CPU):
        told[_CPU] = os.environ[_CPU]
    if not told:
        return []
    means = {name: getattr(options, name) for name in ("deepspeed", "fp16", "bf16", "use_cpu")}
    if isinstance(options.deepspeed, dict):
        means["deepspeed"] = f"ZeRO-{value_at(options.deepspeed, _STAGE)}"
    followed = ", ".join(setting(name, value) for name, value in told.items())
    options_so = ", ".join(setting(name, value) for name, value in means.items() if value not in (None, False))
    return [f"accelerate launch: {followed} sets {options_so or 'nothing that differs from the options'}"]


def _is_true(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes")


def _take_precision(options: Any) -> None:
    """Set bf16 or fp16; ``no`` is ignored, as it is the launcher's value by default."""
    asked = os.environ.get(_PRECISION, "no").lower()
    if asked == "no":
        return
    if asked not in ("bf16", "fp16"):
        raise OptionError(f"{setting(_PRECISION, asked)} (accelerate launch): not supported; set bf16, fp16 or no")
    own = requested_dtype(options)
    if own is None:
        setattr(options, asked, True)
    elif own != {"bf16": BF16, "fp16": FP16}[asked]:
        which = next(n for n in ("fp16", "bf16", "dtype") if getattr(options, n) not in (None, "auto"))
        raise contradiction(options, which, _PRECISION, asked)


def _take_engine(options: Any) -> None:
    """Set ``deepspeed`` to the file of the launcher, or to a JSON built from its settings."""
    file = os.environ.get(_FILE, "none")
    said = _said()
    if file != "none":
        given = load_deepspeed_config(file, "")
        if options.deepspeed is not None and load_deepspeed_config(options.deepspeed, "") != given:
            raise contradiction(options, "deepspeed", _FILE, file)
        options.deepspeed = file
    elif options.deepspeed is None:
        options.deepspeed = _made(said)
    _check_alike(options, load_deepspeed_config(options.deepspeed, ""), said)


def _said() -> dict[str, Any]:
    """Return the launcher's settings of the engine, by dotted path in a DeepSpeed JSON."""
    said: dict[str, Any] = {}
    for name, path in _PATHS.items():
        text = os.environ.get(name, "none").lower()
        if text in ("none", "auto", ""):
            continue
        kind = str if path.endswith("device") else float if path.endswith("clipping") else int
        try:
            said[path] = kind(text)
        except ValueError:
            raise OptionError(f"{setting(name, text)} (accelerate launch): expected a number") from None
    return said


def _made(said: dict[str, Any]) -> LoadedConfig:
    """Return the packaged JSON of the stage, with the requested offloading."""
    stage = said.get(_STAGE, 2)  # Accelerate's default
    if stage not in (0, 1, 2, 3):
        raise OptionError(f"{setting('ACCELERATE_DEEPSPEED_ZERO_STAGE', stage)} (accelerate launch): set 0, 1, 2 or 3")
    config = load_deepspeed_config(None, f"zero{stage}")
    for path, value in said.items():
        if path.endswith(".device"):
            set_at(config, path, value)
            set_at(config, path.replace(".device", ".pin_memory"), "auto")
    return LoadedConfig(config, "accelerate launch")


def _check_alike(options: Any, config: dict[str, Any], said: dict[str, Any]) -> None:
    """Reject a DeepSpeed JSON, and options, that contradict the launcher's settings."""
    for name, path in _PATHS.items():
        if path not in said:
            continue
        option = {"gradient_accumulation_steps": path, "gradient_clipping": "max_grad_norm"}.get(path, "deepspeed")
        own = value_at(config, path) if option == "deepspeed" else getattr(options, option)
        if own != "auto" and (own if own is not None else "none") != said[path]:
            detail = f" ({path}={own!r})" if option == "deepspeed" else ""
            raise OptionError(
                f"{setting(name, said[path])} (accelerate launch) contradicts the option "
                f"{setting(option, getattr(options, option))}{detail}; remove one of them"
            )
