"""Matrix products whose sums are wider than their inputs, and how many rows of a product are taken at once."""

from __future__ import annotations

import torch
from torch import Tensor

_BYTES_PER_LOGIT = 6  # an fp32 logit and a 16-bit copy of its gradient coefficient
_SMALLEST_TILE = 16  # rows; fewer would only multiply the reading of the weight
_CAST_SLICE = 4096  # vocabulary rows cast to fp32 at once where a product cannot accumulate wider than its input


def tile_length(rows: int, width: int, tile_bytes: int) -> int:
    """How many of ``rows`` to take at once so that a tile of ``width`` columns stays inside ``tile_bytes``.

    Never more than a third of the rows (unless they are few): the whole matrix must not exist, whatever the budget.
    """
    return max(1, min(max(_SMALLEST_TILE, -(-rows // 3)), max(256, tile_bytes // (_BYTES_PER_LOGIT * width))))


def sums_wider(factor: Tensor) -> bool:
    """Whether the device multiplies 16-bit factors as they are, and sums in fp32: a GPU does, the CPU casts them."""
    return factor.is_cuda


def mixed_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left @ right`` of two 16-bit matrices with sums and result in fp32, where :func:`sums_wider`."""
    return torch.mm(left, right, out_dtype=dtype)


def coefficient_dtype(factor: Tensor, wide: torch.dtype) -> torch.dtype:
    """The dtype in which coefficients in ``wide`` enter a product with ``factor``."""
    return factor.dtype if sums_wider(factor) else wide


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left @ right`` with result and accumulation in ``dtype``, (C, K) x (K, M) -> (C, M)."""
    if left.dtype == right.dtype == dtype:
        return left @ right
    if sums_wider(left):
        return mixed_product(left.to(right.dtype), right, dtype)
    out = left.new_zeros((left.shape[0], right.shape[1]), dtype=dtype)
    left = left.to(dtype)
    if right.shape[0] > right.shape[1]:
        for start in range(0, right.shape[0], _CAST_SLICE):
            part = slice(start, start + _CAST_SLICE)
            out.addmm_(left[:, part], right[part].to(dtype))
    else:
        for start in range(0, right.shape[1], _CAST_SLICE):
            part = slice(start, start + _CAST_SLICE)
            torch.mm(left, right[:, part].to(dtype), out=out[:, part])
    return out
