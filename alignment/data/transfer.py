"""Move all tensors of a batch to a device in one copy, through a single buffer in pinned memory.

A copy from pageable memory blocks the host, and a batch has many small tensors. A copy from pinned memory is
asynchronous and ordered with the device's other work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self", bound="OnDevice")
_ALIGNMENT = 64  # bytes; larger than the address alignment that any kernel requires


@dataclass(frozen=True)
class OnDevice:
    """Base class of batches whose tensors move to a device together, in one asynchronous copy."""

    def to(self: Self, device: torch.device, leave: Collection[str] = ()) -> Self:
        """Return the batch with all tensors on ``device``, except those in fields and inputs named in ``leave``."""
        tensors: list[Tensor] = []
        _replaced(self, tensors.append, leave)
        moved = iter(transferred(tensors, device))
        return _replaced(self, lambda _: next(moved), leave)


def _replaced(value: Any, change: Callable[[Tensor], Any], leave: Collection[str]) -> Any:
    """Return a batch with every tensor replaced, in nested batches and mappings too, in the order of the fields."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, OnDevice):
        entries = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{n: _replaced(v, change, leave) for n, v in entries.items() if n not in leave})
    if isinstance(value, dict):
        return {name: each if name in leave else _replaced(each, change, leave) for name, each in value.items()}
    return value


def transferred(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move tensors to ``device`` with one asynchronous copy; those that are already there are returned unchanged.

    Each call allocates its own pinned memory from torch's allocator, which reuses it only after the copy has finished.
    The results are views of one tensor, whose memory is freed when the last view is deleted.
    """
    away = [tensor for tensor in tensors if tensor.device != device]
    if not away:
        return list(tensors)
    if device.type == "meta":  # nothing to copy
        return [tensor.to(device) for tensor in tensors]
    starts, size = [], 0  # in bytes
    for tensor in away:
        starts.append(size)
        size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for start, tensor in zip(starts, away, strict=True):
        _view(packed, start, tensor).copy_(tensor)
    there = packed.to(device, non_blocking=True)
    arrived = (_view(there, start, tensor) for start, tensor in zip(starts, away, strict=True))
    return [tensor if tensor.device == device else next(arrived) for tensor in tensors]


def _view(packed: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a view of the buffer at offset ``start`` with the shape and dtype of ``like``."""
    size = like.numel() * like.element_size()
    return packed[start : start + size].view(like.dtype).view(like.shape)
