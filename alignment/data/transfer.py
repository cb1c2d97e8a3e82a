"""Tensors on their way to a device: all of a batch in one piece of page-locked memory, in one copy.

A copy from ordinary memory makes the host wait until it is done, and a batch has many small tensors. From page-locked
memory the device fetches by itself, in the order of its work, while the host goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; more than any kernel asks of the address of a tensor


def transferred(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on ``device``, with one copy that the host does not wait for.

    Each call takes page-locked memory of its own from torch's allocator, which hands it out again only once the copy
    from it is done. What comes back are views of one tensor, and its memory is free when none of them is left.

    Args:
        tensors: of any shape and any dtype, on the host; those that are on ``device`` already are given back as they
            are, and all of them on a machine whose device is the host.
        device: where they are needed.
    """
    away = [tensor for tensor in tensors if tensor.device != device]
    if not away:
        return list(tensors)
    if device.type == "meta":  # shapes alone: there is nothing to copy
        return [tensor.to(device) for tensor in tensors]
    starts, size = _layout(away)
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for start, tensor in zip(starts, away, strict=True):
        _view(packed, start, tensor).copy_(tensor)
    there = packed.to(device, non_blocking=True)
    arrived = (_view(there, start, tensor) for start, tensor in zip(starts, away, strict=True))
    return [tensor if tensor.device == device else next(arrived) for tensor in tensors]


def _layout(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins, in bytes, and the size of all."""
    starts, end = [], 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _view(packed: Tensor, start: int, like: Tensor) -> Tensor:
    """The place of a tensor that begins at ``start``, as a tensor of its shape and dtype."""
    size = like.numel() * like.element_size()
    return packed[start : start + size].view(like.dtype).view(like.shape)
