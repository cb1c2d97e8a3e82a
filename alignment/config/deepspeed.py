"""The DeepSpeed JSON of each engine, built from a user's file or a packaged one and the options.

Nothing is left to chance: "auto" is filled, what DeepSpeed would ignore is refused, and whatever the options decide
(batch sizes, clipping, number formats) is written; a file that says otherwise is a contradiction and is refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.config.deepspeed_keys import check_keys, check_values, set_at, value_at, with_full_names
from alignment.config.dtypes import DtypePlan, uses_cuda
from alignment.config.errors import OptionError, did_you_mean
from alignment.config.fields import parse_json
from alignment.config.lookup import packaged

_MOST_BUCKET = 50_000_000  # elements: 100 MB in bf16
_LEAST_BUCKET = 1_000_000
_MEANT_BY_DEEPSPEED = frozenset({"data_types.keep_in_fp32_modules"})  # here "auto" is DeepSpeed's own word
_NEVER = 1_000_000_000  # steps between DeepSpeed's own progress lines; the loop prints its own
_MUST_BE: dict[str, tuple[Any, str]] = {
    "zero_allow_untested_optimizer": (True, "the optimizer is chosen by optim"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True, "the saved folder needs the whole weights"),
}
# By default DeepSpeed waits for the GPU before and after each micro-batch, to report a speed that nobody asks for.
_TIMER = "timers.throughput.enabled"
_DEFAULTS = {"steps_per_print": _NEVER, "wall_clock_breakdown": False}


@dataclass(frozen=True)
class Situation:
    """What the values depend on."""

    hidden_size: int
    stage: int
    pin_memory: bool
    ranks: int = 1
    offloaded: bool = False  # the optimizer

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer, about."""
        return 12 * self.hidden_size**2


def _bucket(at: Situation) -> int:
    return min(max(at.hidden_size**2, _LEAST_BUCKET), _MOST_BUCKET)


def _live(at: Situation) -> int:
    return max(3 * at.layer, _LEAST_BUCKET)


# What "auto" means, key by key. DeepSpeed itself would take its defaults, which are made for cards of 80 GB, or fail.
# The numbers here are for 24 GB and follow the model's hidden size h: one decoder layer has about 12·h² parameters.
_RULES: dict[str, Callable[[Situation], Any]] = {
    "zero_optimization.reduce_bucket_size": _bucket,
    "zero_optimization.allgather_bucket_size": _bucket,
    "zero_optimization.stage3_prefetch_bucket_size": lambda at: min(at.layer, _MOST_BUCKET),
    "zero_optimization.stage3_param_persistence_threshold": lambda at: 10 * at.hidden_size,
    "zero_optimization.stage3_max_live_parameters": _live,
    "zero_optimization.stage3_max_reuse_distance": _live,
    "zero_optimization.sub_group_size": lambda at: 100_000_000,
    # At stage 3 weights are fetched beside the computation too, from host memory also by one rank. At stage 2 there is
    # nothing to overlap without another rank, and it costs a second bucket and a wait per micro-batch.
    "zero_optimization.overlap_comm": lambda at: at.stage == 3 or (at.stage == 2 and at.ranks > 1),
    "zero_optimization.contiguous_gradients": lambda at: True,
    "zero_optimization.reduce_scatter": lambda at: True,
    "zero_optimization.allgather_partitions": lambda at: True,
    # It spreads the copies to host memory over the ranks.
    "zero_optimization.round_robin_gradients": lambda at: at.stage == 2 and at.offloaded and at.ranks > 1,
    "zero_optimization.offload_param.pin_memory": lambda at: at.pin_memory,
    "zero_optimization.offload_optimizer.pin_memory": lambda at: at.pin_memory,
}


def _autos(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted paths at which a config says "auto"."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + key


def fill_auto(config: dict[str, Any], situation: Situation, fixed: dict[str, Any], where: str) -> None:
    """Replace every "auto" in place: by a rule of this file, or by ``fixed`` (dotted path to value).

    Raises:
        OptionError: "auto" at a key for which there is no value.
    """
    for path in list(_autos(config)):
        if path in _MEANT_BY_DEEPSPEED:
            continue
        if path in fixed:
            set_at(config, path, fixed[path])
        elif path in _RULES:
            set_at(config, path, _RULES[path](situation))
        else:
            known = [*_RULES, *fixed]
            raise OptionError(
                f'{where}: {path}="auto": there is no automatic value for this key{did_you_mean(path, known)}; set one'
            )


class LoadedConfig(dict[str, Any]):
    """A DeepSpeed JSON that knows where it came from, so that messages can say so."""

    def __init__(self, content: dict[str, Any], source: str) -> None:
        super().__init__(content)
        self.source = source


def load_deepspeed_config(value: str | Path | dict[str, Any] | None, default: str) -> LoadedConfig:
    """A DeepSpeed JSON as a mapping of its own.

    Args:
        value: a path, the name of a packaged file (``zero2``, ``zero2.json``), a mapping, or None for ``default``.
        default: the name of a packaged file.

    Raises:
        OptionError: no such file, or not valid JSON (with the line).
    """
    if isinstance(value, dict):
        return LoadedConfig(copy.deepcopy(dict(value)), source_of(value))
    path = Path(default if value is None else value).expanduser()
    if not path.is_file():
        path = packaged("ds_configs", str(path))
    try:
        config = parse_json(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise OptionError(f"{path} line {error.lineno}: not valid JSON: {error.msg}; correct that line") from None
    except OptionError as error:
        raise OptionError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read ({error}); give a JSON text file") from None
    if not isinstance(config, dict):
        raise OptionError(f"{path}: expected a JSON object of DeepSpeed keys, found {type(config).__name__}")
    return LoadedConfig(config, str(path))


def policy_config(
    options: Any,
    base: dict[str, Any],
    plan: DtypePlan,
    world_size: int,
    hidden_size: int,
    where: str | None = None,
) -> dict[str, Any]:
    """The JSON of the policy's engine.

    Args:
        options: the run's options.
        base: what :func:`load_deepspeed_config` gave; not changed.
        plan: what ``plan_dtypes`` made of the two.
        world_size: number of ranks.
        hidden_size: of the model, for "auto".
        where: how messages name ``base``; None: by the file that it was loaded from.

    Raises:
        OptionError: a key that cannot be used, or that contradicts an option; both sides are named.
    """
    where = where or source_of(base)
    config, stage = checked_copy(base, where)
    micro, steps = options.per_device_train_batch_size, options.gradient_accumulation_steps
    fixed: dict[str, tuple[Any, str]] = {
        "train_micro_batch_size_per_gpu": (micro, f"per_device_train_batch_size={micro}"),
        "gradient_accumulation_steps": (steps, f"gradient_accumulation_steps={steps}"),
        "train_batch_size": (
            micro * steps * world_size,
            f"per_device_train_batch_size={micro} x gradient_accumulation_steps={steps} x {world_size} ranks",
        ),
        "gradient_clipping": (float(options.max_grad_norm), f"max_grad_norm={options.max_grad_norm}"),
    }
    offloaded = offload_device(config, "offload_optimizer", where) == "cpu"
    _check_optimizer_place(options, offloaded, stage, where)
    if offloaded:
        fixed["zero_force_ds_cpu_optimizer"] = (False, f"optim={options.optim!r}, which works in host memory")
        if stage == 0:
            raise OptionError(
                f"{where}: zero_optimization.offload_optimizer at zero_optimization.stage=0 has no effect; "
                f"set stage to 2 or 3, or remove it"
            )
    check_param_offload(config, stage, where)
    for section in ("bf16", "fp16", "data_types"):
        for key, value in plan.ds[section].items():
            fixed[f"{section}.{key}"] = (value, f"computing in {plan.compute}")
    situation = Situation(hidden_size, stage, uses_cuda(options), world_size, offloaded)
    return finished(config, {**fixed, **_MUST_BE}, situation, where)


def _check_optimizer_place(options: Any, offloaded: bool, stage: int, where: str) -> None:
    """DeepSpeed's two compiled optimizers each work in one memory only, and Adafactor on whole matrices."""
    if options.optim == "adafactor" and stage > 0:
        raise OptionError(
            f"optim='adafactor': it keeps a number for each row and column of a matrix, and {where} cuts weights into "
            f"flat pieces (zero_optimization.stage={stage}); set deepspeed to zero0, or optim to adamw_8bit"
        )
    if options.optim == "deepspeed_cpu_adam" and not offloaded and uses_cuda(options):
        raise OptionError(
            f"optim={options.optim!r}: it works on weights in host memory, and {where} keeps them on the GPU; set "
            "deepspeed to zero2_offload or zero3_offload, or optim to adamw_torch"
        )
    if options.optim == "deepspeed_fused_adam" and offloaded and uses_cuda(options):
        raise OptionError(
            f"optim={options.optim!r}: it works on weights on the GPU, and {where} offloads the optimizer to host "
            "memory; set optim to adamw_torch or deepspeed_cpu_adam"
        )


def source_of(base: dict[str, Any]) -> str:
    return base.source if isinstance(base, LoadedConfig) else "DeepSpeed mapping"


def checked_copy(base: dict[str, Any], where: str) -> tuple[dict[str, Any], int]:
    """A copy with only keys that can be used, and its ZeRO stage."""
    config = {key: value for key, value in copy.deepcopy(dict(base)).items() if value is not None}
    check_keys(config, where)
    with_full_names(config, where)
    stage = config.setdefault("zero_optimization", {}).setdefault("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise OptionError(f"{where}: zero_optimization.stage={stage!r}: set 0, 1, 2 or 3")
    return config, int(stage)


def offload_device(config: dict[str, Any], section: str, where: str) -> str:
    """The device of an offload section: ``none`` or ``cpu``."""
    device = value_at(config, f"zero_optimization.{section}.device") or "none"
    path = f"{where}: zero_optimization.{section}.device={device!r}"
    if device == "nvme":
        raise OptionError(f"{path}: NVMe offload is not supported yet; set cpu")
    if device not in ("none", "cpu"):
        raise OptionError(f"{path}: set cpu or none")
    return str(device)


def check_param_offload(config: dict[str, Any], stage: int, where: str) -> None:
    if offload_device(config, "offload_param", where) == "cpu" and stage != 3:
        raise OptionError(
            f"{where}: zero_optimization.offload_param at zero_optimization.stage={stage} has no effect; "
            f"set stage to 3, or remove it"
        )


def finished(
    config: dict[str, Any], fixed: dict[str, tuple[Any, str]], situation: Situation, where: str
) -> dict[str, Any]:
    """Fill "auto", refuse what contradicts ``fixed`` (dotted path to value and reason), and write that."""
    if isinstance(situation.hidden_size, bool) or situation.hidden_size < 1:
        raise OptionError(f"hidden_size={situation.hidden_size!r}: the model's config must give a positive number")
    automatic = {path: value for path, (value, _) in fixed.items()}
    fill_auto(config, situation, {**_DEFAULTS, **automatic}, where)
    for path, (value, reason) in fixed.items():
        found = value_at(config, path)
        # Text is compared as such: "fp32" and "float32" are settled by the dtype plan before.
        if found is not None and found != value and not path.startswith("data_types."):
            raise OptionError(f'{where}: {path}={found!r} contradicts {reason}; set {value!r} or "auto", or remove it')
        set_at(config, path, value)
    for key, value in _DEFAULTS.items():
        config.setdefault(key, value)
    if value_at(config, _TIMER) is None:
        set_at(config, _TIMER, False)
    check_values(config, where)
    return config
