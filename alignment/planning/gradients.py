"""Plan where the gradients of a window are accumulated, in which dtype, and how often they are reduced.

The plan depends on sizes and not on the memory that happens to be free, and is made for the rank with the least
memory. It is therefore the same on every rank and in every attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from alignment.config.dtypes import DtypePlan
from alignment.engines.collectives import device, gathered
from alignment.engines.memory import total_bytes
from alignment.internals.deepspeed_state import whole_shape

# Maximum share of a device for everything but activations, with and without gradient checkpointing.
_SHARE = {True: 3 / 4, False: 1 / 2}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MASTER, _ADAMW = 4, 8  # bytes per parameter of fp32 master weights, and of both moments
_GIB = 2**30


class Sizes(NamedTuple):
    """Sizes on a rank.

    Attributes:
        weights: bytes of the unpartitioned policy.
        trained: number of trained parameters.
        others: bytes on the device that other models use.
        capacity: bytes of the device that a process can use.
    """

    weights: int
    trained: int
    others: int
    capacity: int


@dataclass(frozen=True)
class Situation:
    """What a plan depends on in addition to sizes.

    Attributes:
        stage: ZeRO stage.
        ranks: number of ranks.
        micro_batches: maximum number of micro-batches of a window on a rank.
        offloaded: whether the optimizer is in host memory.
        weights_offloaded: whether the weights are in host memory.
        checkpointing: whether gradient checkpointing is on.
        states: bytes of optimizer states per trained parameter.
    """

    stage: int
    ranks: int
    micro_batches: int
    offloaded: bool = False
    weights_offloaded: bool = False
    checkpointing: bool = True
    states: float = _ADAMW


@dataclass(frozen=True)
class GradientPlan:
    """How gradients are accumulated over the micro-batches of a window.

    Attributes:
        accumulate: dtype of the accumulated gradients.
        once: whether each rank accumulates its own gradients, reduced once after the last micro-batch.
        device_bytes: bytes that this takes on a device.
        ranks: number of ranks.
    """

    accumulate: str
    once: bool
    device_bytes: int
    ranks: int = 1

    def describe(self) -> str:
        """Return a line for the start of a run."""
        often = "reduced once per step, " if self.once else "reduced after every micro-batch, "
        place = f"{self.device_bytes / _GIB:.2f} GiB on each device" if self.device_bytes else "in host memory"
        return f"gradients: accumulated in {self.accumulate}, {often if self.ranks > 1 else ''}{place}"


def plan_gradients(sizes: Sizes, dtypes: DtypePlan, at: Situation) -> GradientPlan | None:
    """Return the first candidate that fits in memory, or None if there is nothing to choose.

    The candidates are, in this order: full gradients in fp32 on each rank, reduced once per window (several ranks,
    stages 1 and 2); the rank's partition in fp32; full gradients in the compute dtype, reduced once; and the partition
    in the compute dtype, which an offloaded optimizer keeps in host memory. If the DeepSpeed JSON sets the dtype, only
    candidates with that dtype are considered.
    """
    if at.stage == 0 or at.micro_batches == 1:
        return None
    plans = list(_candidates(sizes, dtypes, at))
    budget = _SHARE[at.checkpointing] * sizes.capacity - _resident(sizes, at)
    return next((plan for plan in plans if plan.device_bytes <= budget), plans[-1])


def least_bytes(trained: int, dtypes: DtypePlan, at: Situation) -> int:
    """Return the bytes of gradients on a device if no other plan fits: 0 if in host memory, or without ZeRO."""
    return 0 if at.stage == 0 else list(_candidates(Sizes(0, trained, 0, 0), dtypes, at))[-1].device_bytes


def _candidates(sizes: Sizes, dtypes: DtypePlan, at: Situation) -> Iterator[GradientPlan]:
    wide = dtypes.accumulation_is_free and at.stage != 1 and not (at.stage == 3 and at.offloaded)
    formats = dict.fromkeys(["float32", dtypes.accumulate] if wide else [dtypes.accumulate])
    share = -(-sizes.trained // at.ranks)
    for accumulate in formats:
        own, same = _BYTES[accumulate], accumulate == dtypes.compute
        if at.ranks > 1 and at.stage in (1, 2):
            # The accumulated gradients, those of one backward pass, and the partition that they are reduced into.
            held = own if same else own + _BYTES[dtypes.compute]
            yield GradientPlan(accumulate, True, held * sizes.trained + own * share, at.ranks)
            if at.stage == 1:
                continue  # stage 1 always does this
        yield GradientPlan(accumulate, False, 0 if at.offloaded and same else own * share, at.ranks)


def _resident(sizes: Sizes, at: Situation) -> float:
    """Return the bytes on a device that are neither gradients nor activations."""
    weights = 0 if at.weights_offloaded else sizes.weights / (at.ranks if at.stage == 3 else 1)
    states = 0 if at.offloaded else (_MASTER + at.states) * sizes.trained / at.ranks
    return weights + states + sizes.others


def sizes_of(model: nn.Module, others: int) -> Sizes:
    """Return the sizes of a loaded policy on the rank with the least memory. Collective.

    Args:
        model: the policy, possibly partitioned.
        others: bytes in use on this rank's device before the policy was loaded.
    """
    weights = trained = 0
    for parameter in model.parameters():
        numel = torch.Size(whole_shape(parameter)).numel()
        weights += numel * parameter.element_size()
        trained += numel if parameter.requires_grad else 0
    least = min(gathered((total_bytes(device()) - others, others)))
    return Sizes(weights, trained, least[1], sum(least))


def bytes_in_use() -> int:
    """Return the bytes of tensors on this rank's device; 0 on a CPU, where host memory is assumed to suffice."""
    here = device()
    return int(torch.cuda.memory_allocated(here)) if here.type == "cuda" else 0


def situation_of(ds_config: dict[str, Any], ranks: int, micro_batches: int, checkpointing: bool) -> Situation:
    """Return the situation of an engine from its JSON and the options that are not in it."""
    zero = ds_config["zero_optimization"]
    states, weights = (
        zero.get(section, {}).get("device") == "cpu" for section in ("offload_optimizer", "offload_param")
    )
    return Situation(int(zero["stage"]), ranks, micro_batches, states, weights, checkpointing)
