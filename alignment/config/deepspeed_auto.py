"""What "auto" means in a DeepSpeed JSON, key by key.

DeepSpeed itself would take its defaults, which are made for cards of 80 GB, or fail. The numbers here are for 24 GB
and follow the model's hidden size h: one decoder layer has about 12·h² parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from alignment.config.deepspeed_keys import set_at
from alignment.config.errors import OptionError
from alignment.config.refusals import nearest

_MOST_BUCKET = 50_000_000  # elements: 100 MB in bf16
_LEAST_BUCKET = 1_000_000
_MEANT_BY_DEEPSPEED = frozenset({"data_types.keep_in_fp32_modules"})  # here "auto" is DeepSpeed's own word


@dataclass(frozen=True)
class Situation:
    """What the values depend on."""

    hidden_size: int
    stage: int
    pin_memory: bool

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer, about."""
        return 12 * self.hidden_size**2


def _bucket(at: Situation) -> int:
    return min(max(at.hidden_size**2, _LEAST_BUCKET), _MOST_BUCKET)


def _live(at: Situation) -> int:
    return max(3 * at.layer, _LEAST_BUCKET)


_RULES: dict[str, Callable[[Situation], Any]] = {
    "zero_optimization.reduce_bucket_size": _bucket,
    "zero_optimization.allgather_bucket_size": _bucket,
    "zero_optimization.stage3_prefetch_bucket_size": lambda at: min(at.layer, _MOST_BUCKET),
    "zero_optimization.stage3_param_persistence_threshold": lambda at: 10 * at.hidden_size,
    "zero_optimization.stage3_max_live_parameters": _live,
    "zero_optimization.stage3_max_reuse_distance": _live,
    "zero_optimization.sub_group_size": lambda at: 100_000_000,
    "zero_optimization.overlap_comm": lambda at: at.stage == 3,
    "zero_optimization.contiguous_gradients": lambda at: True,
    "zero_optimization.reduce_scatter": lambda at: True,
    "zero_optimization.allgather_partitions": lambda at: True,
    "zero_optimization.round_robin_gradients": lambda at: False,
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
                f'{where}: {path}="auto": there is no automatic value for this key{nearest(path, known)}; set one'
            )
