"""The few collectives this project needs. Their shapes are fixed, so that no rank waits for one that another skips."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alignment.config.errors import AlignmentError, CheckpointError, TrainingError, one_line
from alignment.data.transfer import transferred
from alignment.run.ending import OtherRankFailed
from alignment.run.ranks import tell
from alignment.run.stop import REQUESTS, Cut


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor of the same shape over all ranks, in place; return it."""
    return _in_place(values, dist.all_reduce)


def _in_place(values: Tensor, collective: Callable[[Tensor], object]) -> Tensor:
    """Apply a collective to a tensor on any device. NCCL has no backend for tensors in host memory."""
    there = values.to(device())
    collective(there)
    return values if there is values else values.copy_(there)


def true_on_every_rank(mine: bool) -> bool:
    """Whether ``mine`` is true on all ranks; the same answer on every rank."""
    return largest_numbers([not mine]) == [0.0]


def largest_numbers(values: Sequence[float]) -> list[float]:
    """The maximum of each number over all ranks, on every rank; the host waits for the device once."""
    (numbers,) = transferred([torch.tensor(values, dtype=torch.float64)], device())
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return [float(number) for number in numbers.tolist()]


def gathered(value: Any) -> list[Any]:
    """The picklable objects of all ranks, on every rank."""
    if dist.get_world_size() == 1:
        return [value]  # without a round trip through the device
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def copied_from_first_rank(values: Tensor) -> Tensor:
    """Copy the first rank's values into a tensor of the same shape, in place; return it."""
    return _in_place(values, partial(dist.broadcast, src=0))


def from_first_rank(value: Any) -> Any:
    """The first rank's picklable object, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def on_first_rank(compute: Callable[[], Any]) -> Any:
    """Run ``compute`` on the first rank and return its result, or raise its error, on every rank.

    Raises:
        AlignmentError: the user error of the first rank.
        OtherRankFailed: on the other ranks, if the first one raises any other exception.
    """
    result: Any = None
    failed: AlignmentError | None = None
    if dist.get_rank() == 0:
        try:
            result = compute()
        except AlignmentError as error:
            failed = error
        except Exception as error:
            from_first_rank((None, OtherRankFailed(f"rank 0 failed: {type(error).__name__}: {one_line(error)}")))
            raise
    result, failed = from_first_rank((result, failed))
    if failed is not None:
        raise failed
    return result


@contextlib.contextmanager
def together(kind: type[AlignmentError] = CheckpointError) -> Iterator[None]:
    """Within this context, ranks work independently, without collectives; if one of them fails, all do at the end.

    They raise an error of this class with the message of the first rank that failed. With ``OtherRankFailed``, ranks
    that have failed raise their own error.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    texts = gathered(None if own is None else one_line(own))
    if own is not None and (kind is OtherRankFailed or not isinstance(own, AlignmentError)):
        raise own
    for rank, text in enumerate(texts):
        if text is not None:
            raise kind(f"rank {rank} failed: {text}" if kind is OtherRankFailed else text) from None


@contextlib.contextmanager
def together_or_cut(kind: type[AlignmentError] = TrainingError) -> Iterator[None]:
    """Like :func:`together`, for work that a requested stop may cut short: if a rank was asked to, all raise Cut."""
    failed: AlignmentError | None = None
    try:
        with together(kind), contextlib.suppress(Cut):
            yield
    except AlignmentError as error:
        failed = error
    if REQUESTS.may_cut and largest_numbers([REQUESTS.reason is not None]) != [0.0]:
        if failed is not None:
            tell(f"{failed}. The run is stopping, and repeats this step when it resumes")
        raise Cut from failed
    if failed is not None:
        raise failed


def barrier() -> None:
    """Return when every rank has called this; the host waits, also with NCCL.

    An all-reduce is not enough: with NCCL it only orders the GPU's work and returns immediately.
    """
    here = device()
    dist.barrier(device_ids=[here.index] if here.type == "cuda" else None)


def device() -> torch.device:
    """This rank's device."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())
