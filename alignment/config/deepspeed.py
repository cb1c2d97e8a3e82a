"""Build the DeepSpeed JSON of each engine from a user's or packaged file and the options.

Every "auto" is replaced by a value, keys that DeepSpeed would ignore are rejected, and the values that the options
determine (batch sizes, clipping, dtypes) are filled in. A file that contradicts the options is rejected.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from alignment.config.deepspeed_keys import check_keys, check_values, set_at, value_at
from alignment.config.dtypes import DtypePlan, uses_cuda
from alignment.config.errors import OptionError, did_you_mean, refuse
from alignment.config.fields import parse_json
from alignment.config.lookup import packaged

_MOST_BUCKET = 50_000_000  # elements: 100 MB in bf16
_LEAST_BUCKET = 1_000_000
_DEFAULTS = {
    "steps_per_print": 1_000_000_000,  # the training loop prints its own lines
    "wall_clock_breakdown": False,
    # By default DeepSpeed synchronizes with the GPU before and after each micro-batch to report a throughput.
    "timers.throughput.enabled": False,
}

Fixed: TypeAlias = dict[str, tuple[Any, str]]  # dotted path to a required value and the reason


@dataclass(frozen=True)
class Situation:
    """What the values of "auto" depend on."""

    hidden_size: int
    stage: int
    pin_memory: bool
    ranks: int = 1
    offloaded: bool = False  # the optimizer
    layer: int = 0  # elements of a frozen model's largest decoder layer; 0 if unknown

    def automatic(self) -> dict[str, Any]:
        """Return the value of "auto" for each key, by its dotted path.

        DeepSpeed itself would use its defaults, which suit 80 GB GPUs, or fail. The values here are for 24 GB GPUs and
        depend on the model's hidden size h: one decoder layer has about 12·h² parameters.

        A frozen model's layer is gathered as a whole while the previous one computes. DeepSpeed fetches ahead until
        the bucket or the limit of live parameters is exceeded, so that two layers are gathered and not three. A much
        larger layer, as in a mixture of experts, is gathered in parts.
        """
        layer, bucket = 12 * self.hidden_size**2, min(max(self.hidden_size**2, _LEAST_BUCKET), _MOST_BUCKET)
        ahead, live = min(layer, _MOST_BUCKET), 3 * layer
        if 0 < self.layer <= live:
            ahead, live = self.layer, 2 * self.layer
        live = max(live, _LEAST_BUCKET)
        values = {
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": ahead,
            "stage3_param_persistence_threshold": 10 * self.hidden_size,
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
            "sub_group_size": 100_000_000,
            # At stage 3, weights are also fetched during the computation, with a single rank too if they are in host
            # memory. At stage 2 and a single rank, there is nothing to overlap, at the cost of a second bucket.
            "overlap_comm": self.stage == 3 or (self.stage == 2 and self.ranks > 1),
            **dict.fromkeys(("contiguous_gradients", "reduce_scatter", "allgather_partitions"), True),
            # Distributes the copies to host memory over the ranks.
            "round_robin_gradients": self.stage == 2 and self.offloaded and self.ranks > 1,
            "offload_param.pin_memory": self.pin_memory,
            "offload_optimizer.pin_memory": self.pin_memory,
        }
        return {f"zero_optimization.{key}": value for key, value in values.items()}


def _autos(config: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths whose value is "auto"."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == "auto":
            yield prefix + key


class LoadedConfig(dict[str, Any]):
    """A DeepSpeed JSON with its source, for messages."""

    def __init__(self, content: dict[str, Any], source: str) -> None:
        super().__init__(content)
        self.source = source


def load_deepspeed_config(value: str | Path | dict[str, Any] | None, default: str) -> LoadedConfig:
    """Load a DeepSpeed JSON from a path, the name of a packaged file (``default`` for None), or a mapping, by copying.

    Raises:
        OptionError: the file does not exist or is not valid JSON.
    """
    if isinstance(value, dict):
        return LoadedConfig(copy.deepcopy(dict(value)), source_of(value))
    path = Path(default if value is None else value).expanduser()
    path = path if path.is_file() else packaged("ds_configs", str(path))
    try:
        config = parse_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise OptionError(f"{path}: cannot be read ({error}); pass a JSON file") from None
    if not isinstance(config, dict):
        raise OptionError(f"{path}: expected a JSON object with DeepSpeed keys, found {type(config).__name__}")
    return LoadedConfig(config, str(path))


def policy_config(
    options: Any, base: dict[str, Any], plan: DtypePlan, world_size: int, hidden_size: int
) -> dict[str, Any]:
    """Build the JSON of the policy's engine from the result of :func:`load_deepspeed_config`, which is not modified.

    ``plan`` is the result of ``plan_dtypes`` for the two, and ``hidden_size``, that of the model, is for "auto".

    Raises:
        OptionError: a key is not supported, or contradicts an option; the message names both.
    """
    where = source_of(base)
    config, stage = checked_copy(base, where)
    micro, steps = options.per_device_train_batch_size, options.gradient_accumulation_steps
    rows, times = f"per_device_train_batch_size={micro}", f"gradient_accumulation_steps={steps}"
    fixed: Fixed = {
        "train_micro_batch_size_per_gpu": (micro, rows),
        "gradient_accumulation_steps": (steps, times),
        "train_batch_size": (micro * steps * world_size, f"{rows} x {times} x {world_size} ranks"),
        "gradient_clipping": (float(options.max_grad_norm), f"max_grad_norm={options.max_grad_norm}"),
        "zero_allow_untested_optimizer": (True, "the option optim, which selects the optimizer"),
        "zero_optimization.stage3_gather_16bit_weights_on_model_save": (True, "saving full weights"),
    }
    offloaded = offload_device(config, "offload_optimizer", stage, where) == "cpu"
    offload_device(config, "offload_param", stage, where)
    _check_optimizer_place(options, offloaded, stage, where)
    if offloaded:
        fixed["zero_force_ds_cpu_optimizer"] = (False, f"optim={options.optim!r}, which runs in host memory")
    for section, values in plan.ds.items():
        for key, value in values.items():
            fixed[f"{section}.{key}"] = (value, plan.reason)
    return finished(config, fixed, Situation(hidden_size, stage, uses_cuda(options), world_size, offloaded), where)


def _check_optimizer_place(options: Any, offloaded: bool, stage: int, where: str) -> None:
    """Check that the optimizer supports the memory where it runs, and for Adafactor, that matrices are whole."""
    optim, on_gpu = options.optim, uses_cuda(options)
    if optim == "adafactor" and stage > 0:
        why = f"requires full weight matrices, but {where} shards them (zero_optimization.stage={stage})"
        refuse(options, "optim", f"{why}; set deepspeed to zero0, or optim to adamw_8bit")
    if on_gpu and {"deepspeed_cpu_adam": True, "deepspeed_fused_adam": False}.get(optim, offloaded) != offloaded:
        does = "offloads the optimizer to host memory" if offloaded else "keeps the optimizer on the GPU"
        refuse(options, "optim", f"cannot be used, as {where} {does}; set optim to adamw_torch, or another deepspeed")


def source_of(base: dict[str, Any]) -> str:
    """Return the name of a DeepSpeed JSON for messages."""
    return base.source if isinstance(base, LoadedConfig) else "DeepSpeed mapping"


def checked_copy(base: dict[str, Any], where: str) -> tuple[dict[str, Any], int]:
    """Check the keys of a config; return a copy of it, and its ZeRO stage."""
    config = {key: value for key, value in copy.deepcopy(dict(base)).items() if value is not None}
    check_keys(config, where)
    stage = config.setdefault("zero_optimization", {}).setdefault("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise OptionError(f"{where}: zero_optimization.stage={stage!r}: set 0, 1, 2 or 3")
    return config, int(stage)


def offload_device(config: dict[str, Any], section: str, stage: int, where: str) -> str:
    """Return the device of an offload section, ``none`` or ``cpu``, which must have an effect at the ZeRO stage."""
    device = str(value_at(config, f"zero_optimization.{section}.device") or "none")
    text = f"{where}: zero_optimization.{section}.device={device!r}"
    if device not in ("none", "cpu"):
        raise OptionError(f"{text}: not supported; set cpu or none")
    least = 3 if section == "offload_param" else 1
    if device == "cpu" and stage < least:
        raise OptionError(f"{text}: no effect at zero_optimization.stage={stage}; set stage to 3, or remove it")
    return device


def finished(config: dict[str, Any], fixed: Fixed, situation: Situation, where: str) -> dict[str, Any]:
    """Replace "auto", and fill in ``fixed`` (dotted path to value and reason), rejecting contradictions of it."""
    values = {**_DEFAULTS, **{path: value for path, (value, _) in fixed.items()}}
    automatic = {**situation.automatic(), **values, "data_types.keep_in_fp32_modules": "auto"}  # DeepSpeed's own value
    for path in list(_autos(config)):
        if path not in automatic:
            near = did_you_mean(path, automatic)
            raise OptionError(f'{where}: {path}="auto": this key has no automatic value; set a value{near}')
        set_at(config, path, automatic[path])
    for path, (value, reason) in fixed.items():
        found = value_at(config, path)
        # Dtypes such as "fp32" and "float32" have been checked by the dtype plan.
        if found is not None and found != value and not path.startswith("data_types."):
            raise OptionError(f'{where}: {path}={found!r} contradicts {reason}; set {value!r} or "auto", or remove it')
    for path, value in values.items():
        if path in fixed or value_at(config, path) is None:
            set_at(config, path, value)
    check_values(config, where)
    return config
