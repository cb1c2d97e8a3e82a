"""What DeepSpeed allocates on each GPU and in host memory for the weights that are trained.

The figures were counted on engines of DeepSpeed 0.19.8 at stages 0 to 3, one and two ranks, bf16 and fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from alignment.config.deepspeed_keys import value_at
from alignment.engines.memory import page_locked

Parts: TypeAlias = Mapping[str, float]
_FP32, _FP64 = 4, 8
_FLATTENED = 500_000_000  # elements that DeepSpeed's engine flattens at a time to average gradients without ZeRO


@dataclass(frozen=True)
class Trained:
    """What is trained.

    Attributes:
        numel: number of trained parameters.
        widest: number of elements of the largest of them, of which a sub-group of ZeRO-3 has at least one.
        group: number of elements of the largest parameter group.
        itemsize: bytes per element in the compute dtype.
        states: bytes of optimizer states per parameter.
        master: bytes per element of master weights.
        accumulated: bytes per element of accumulated gradients; None if a window has a single micro-batch.
        once: whether gradients are reduced once per window.
    """

    numel: int
    widest: int
    group: int
    itemsize: int
    states: float
    master: int = _FP32
    accumulated: int | None = None
    once: bool = False


@dataclass(frozen=True)
class EngineBytes:
    """Bytes of an engine without weights and activations, by part.

    Attributes:
        resident: at all times.
        begun: in addition, in the backward pass of a window's last micro-batch.
        kept: share of the bytes of that pass's gradients that is kept until it ends.
        complete: in addition to ``resident``, after it, while gradients are reduced.
        step: in addition to ``resident``, in the optimizer's step.
        host: in host memory of this rank.
    """

    resident: Parts
    begun: Parts
    kept: float
    complete: Parts
    step: Parts
    host: Parts

    @property
    def gradients(self) -> int:
        """Bytes of gradients on a GPU at the end of a window."""
        return int(self.resident.get("gradients", 0) + self.complete.get("gradients", 0))


def engine_bytes(config: dict[str, Any], trained: Trained, ranks: int) -> EngineBytes:
    """Return what an engine with this JSON allocates.

    With n trained parameters of c bytes and R ranks, masters and states are those of n/R parameters at every stage but
    0, where fp32 weights are their own masters. Gradients in the dtype of the weights are flattened, and copied to
    fp32, in the step; at stage 3 for one sub-group at a time.
    """
    zero = config["zero_optimization"]
    stage, n, c = int(zero["stage"]), trained.numel, trained.itemsize
    share = n if stage == 0 else n / ranks
    own = trained.accumulated or c
    copied = 0 if own != c or trained.master != _FP32 else c + (_FP32 if c != _FP32 else 0)
    bucket = int(value_at(config, "zero_optimization.reduce_bucket_size") or n) * c
    states: dict[str, float] = {"optimizer states": trained.states * share}
    if stage > 0 or c != _FP32:
        states["master weights"] = trained.master * share
    if stage > 0 and value_at(config, "zero_optimization.offload_optimizer.device") == "cpu":
        return _offloaded(stage, trained, states, share, bucket)
    begun: Parts
    complete: Parts
    step: Parts
    if stage == 0:
        begun = {"gradients": n * c if trained.accumulated else 0}
        step = {"gradients": n * c, "optimizer step": _FP32 * n if c != _FP32 else 0}
        complete = {"gradients": n * c, "buckets": min(n, _FLATTENED) * c}
        return EngineBytes(states, begun, 0.0 if trained.accumulated else 1.0, complete, step, {})
    norm = _FP64 * min(share, trained.widest / (ranks if stage == 3 else 1))  # of one gradient at a time
    if stage == 3:
        group = min(trained.group / ranks, max(int(zero.get("sub_group_size") or share), trained.widest))
        resident = states | {"gradients": own * share, "buckets": bucket}
        step = {"optimizer step": max((_FP32 if own != c or c == _FP32 else _FP32 + c) * group, norm)}
        return EngineBytes(resident, {}, 0.0, {}, step, {})
    if stage == 1 or trained.once:  # full gradients, reduced at the end of the window
        begun = {"gradients": own * n if trained.accumulated else 0}
        # Gradients in another dtype are accumulated at the end of each backward pass, before they are reduced.
        complete = {
            "gradients": own * n + max(own * share, c * n if own != c else 0),
            "buckets": bucket if trained.once else 0,
        }
        kept = 0.0 if trained.accumulated else 1.0
    else:
        buckets = bucket * (2 if zero.get("overlap_comm") else 1)
        # In the dtype of the weights, the last pass has a buffer of its own, which is allocated when it begins.
        passes = int(trained.accumulated is not None) + int(own == c)
        begun = {"gradients": passes * own * share, "buckets": buckets}
        kept, complete = 0.0, begun
    step = {"gradients": own * share, "optimizer step": max(copied * trained.group / ranks, norm)}
    return EngineBytes(states, begun, kept, complete, step, {})


def _offloaded(stage: int, trained: Trained, states: dict[str, float], share: float, bucket: float) -> EngineBytes:
    """Masters, states and fp32 gradients in host memory; gradients pass through buckets on the GPU.

    Below stage 3, gradients that are accumulated in another dtype than that of the weights stay on the GPU.
    """
    n, c = float(trained.numel), float(trained.itemsize)
    own = trained.accumulated or c
    separate = own != c and stage < 3
    host = states | {"gradients": (_FP32 + own) * share}
    host["page-locked rounding"] = sum(page_locked(size) - size for size in host.values())
    full = own * n if stage < 3 and trained.once else 0
    begun = {"gradients": full + (own * share if separate and not full else 0), "buckets": 2 * bucket}
    complete = {"gradients": full + (max(own * share, c * n if full else 0) if separate else 0), "buckets": 2 * bucket}
    return EngineBytes({}, begun, 0.0, complete, {}, host)
