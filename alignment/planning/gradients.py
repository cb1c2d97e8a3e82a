"""Where a window's gradients are summed, in which format, and how often they are reduced: what of it fits.

Decided from sizes, not from what happens to be free, and for the rank that has least: so it is the same on every rank
and at every start of a run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from alignment.config.dtypes import DtypePlan
from alignment.engines.collectives import device, gathered
from alignment.engines.memory.devices import total_bytes
from alignment.internals.deepspeed_state import whole_shape

# Of a device: the most that may stay on it while activations come and go, with and without checkpointing.
_SHARE = {True: 3 / 4, False: 1 / 2}
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MASTER, _ADAMW = 4, 8  # bytes per parameter; the second of both moments
_GIB = 2**30


class Sizes(NamedTuple):
    """Of a rank.

    Attributes:
        weights: bytes of the policy on its device, as a whole.
        trained: elements of its trained parameters.
        others: bytes on the device that belong to other models.
        capacity: bytes of the device that a process may use.
    """

    weights: int
    trained: int
    others: int
    capacity: int


@dataclass(frozen=True)
class Situation:
    """What a plan depends on beside sizes.

    Attributes:
        stage: of ZeRO.
        ranks: how many there are.
        micro_batches: of a window, at most.
        offloaded: the optimizer is in host memory.
        weights_offloaded: so are the weights.
        checkpointing: activations are computed again in the backward pass.
        states: bytes per trained parameter of the optimizer's states.
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
    """How gradients are summed over the micro-batches of a window.

    Attributes:
        accumulate: the format.
        once: each rank sums its own, and they are reduced after the last micro-batch.
        device_bytes: what that takes on a device.
        ranks: how many there are.
    """

    accumulate: str
    once: bool
    device_bytes: int
    ranks: int = 1

    def describe(self) -> str:
        """One line for the start of a run."""
        often = "reduced once per step, " if self.once else "reduced at each micro-batch, "
        place = f"{self.device_bytes / _GIB:.2f} GiB on each device" if self.device_bytes else "in host memory"
        return f"gradients: summed in {self.accumulate}, {often if self.ranks > 1 else ''}{place}"


def plan_gradients(sizes: Sizes, dtypes: DtypePlan, at: Situation) -> GradientPlan | None:
    """The first of these that fits; None where there is nothing to choose.

    fp32 sums on each rank, reduced once per window (with several ranks, stages 1 and 2); fp32 sums of this rank's
    partition; sums in the compute dtype on each rank, reduced once; the same of the partition, which an offloaded
    optimizer keeps in host memory. A format that the DeepSpeed JSON names is kept.
    """
    if at.stage == 0 or at.micro_batches == 1:
        return None
    plans = list(_candidates(sizes, dtypes, at))
    budget = _SHARE[at.checkpointing] * sizes.capacity - _resident(sizes, at)
    return next((plan for plan in plans if plan.device_bytes <= budget), plans[-1])


def least_bytes(trained: int, dtypes: DtypePlan, at: Situation) -> int:
    """What gradients take of a device if no other plan fits: 0 where they wait in host memory, or without ZeRO."""
    return 0 if at.stage == 0 else list(_candidates(Sizes(0, trained, 0, 0), dtypes, at))[-1].device_bytes


def _candidates(sizes: Sizes, dtypes: DtypePlan, at: Situation) -> Iterator[GradientPlan]:
    wide = dtypes.accumulation_is_free and at.stage != 1 and not (at.stage == 3 and at.offloaded)
    formats = dict.fromkeys(["float32", dtypes.accumulate] if wide else [dtypes.accumulate])
    share = -(-sizes.trained // at.ranks)
    for accumulate in formats:
        own, same = _BYTES[accumulate], accumulate == dtypes.compute
        if at.ranks > 1 and at.stage in (1, 2):
            # The sums, beside them the gradients of one backward pass, and the partition that they are reduced into.
            held = own if same else own + _BYTES[dtypes.compute]
            yield GradientPlan(accumulate, True, held * sizes.trained + own * share, at.ranks)
            if at.stage == 1:
                continue  # it does so anyway
        yield GradientPlan(accumulate, False, 0 if at.offloaded and same else own * share, at.ranks)


def _resident(sizes: Sizes, at: Situation) -> float:
    """Bytes that stay on a device beside gradients."""
    weights = 0 if at.weights_offloaded else sizes.weights / (at.ranks if at.stage == 3 else 1)
    states = 0 if at.offloaded else (_MASTER + at.states) * sizes.trained / at.ranks
    return weights + states + sizes.others


def sizes_of(model: nn.Module, others: int) -> Sizes:
    """The sizes of a loaded policy, of the rank that has least room; collective.

    Args:
        model: the policy, whole or partitioned.
        others: bytes that were on this rank's device before it was loaded.
    """
    weights = trained = 0
    for parameter in model.parameters():
        numel = torch.Size(whole_shape(parameter)).numel()
        weights += numel * parameter.element_size()
        trained += numel if parameter.requires_grad else 0
    least = min(gathered((total_bytes(device()) - others, others)))
    return Sizes(weights, trained, least[1], sum(least))


def bytes_in_use() -> int:
    """Of this rank's device by tensors; 0 on a CPU, whose host has room for them."""
    here = device()
    return int(torch.cuda.memory_allocated(here)) if here.type == "cuda" else 0


def situation_of(ds_config: dict[str, Any], ranks: int, micro_batches: int, checkpointing: bool) -> Situation:
    """What the JSON of an engine says, and the options that are not in it."""
    zero = ds_config["zero_optimization"]
    states, weights = (
        zero.get(section, {}).get("device") == "cpu" for section in ("offload_optimizer", "offload_param")
    )
    return Situation(int(zero["stage"]), ranks, micro_batches, states, weights, checkpointing)
