"""From hidden states to logits: matrix products in a wider dtype than their inputs, sizes of tiles, scale and cap."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BYTES_PER_LOGIT = 6  # an fp32 logit and a 16-bit copy of its gradient coefficient
_SMALLEST_BLOCK = 256  # rows of a product; with fewer, a GPU is not busy
_SMALLEST_TILE = 16  # rows; with fewer, the weight would be read too often
_CAST_SLICE = (
    4096  # vocabulary rows cast to fp32 at a time if a product cannot accumulate in a wider dtype than its inputs
)


def tile_length(rows: int, width: int, tile_bytes: int) -> int:
    """Return how many of ``rows`` to process at a time so that a tile of ``width`` columns fits in ``tile_bytes``.

    At most a third of the rows (unless there are only a few), so that the full matrix never exists.
    """
    return max(1, min(max(_SMALLEST_TILE, -(-rows // 3)), max(256, tile_bytes // (_BYTES_PER_LOGIT * width))))


def sums_wider(factor: Tensor) -> bool:
    """Return whether the device multiplies 16-bit matrices and accumulates in fp32. A GPU does; a CPU casts them."""
    return factor.is_cuda


def mixed_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``left @ right`` of two 16-bit matrices with fp32 accumulation and result, if :func:`sums_wider`."""
    return torch.mm(left, right, out_dtype=dtype)


def coefficient_dtype(factor: Tensor, wide: torch.dtype) -> torch.dtype:
    """Return the dtype to which coefficients in ``wide`` are cast for a product with ``factor``."""
    return factor.dtype if sums_wider(factor) else wide


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ``left @ right`` with accumulation and result in ``dtype``, (C, K) x (K, M) -> (C, M)."""
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


def write_product(out: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, tile_bytes: int) -> None:
    """Write ``left @ right`` to ``out`` with accumulation in ``dtype``, (C, K) x (K, M) -> (C, M).

    A result in ``dtype`` needs no temporary tensor. Any other is rounded in blocks of rows of at most a third of
    ``tile_bytes``: what the coefficients of a tile, 4 of its 6 bytes per logit, leave. Products that round their own
    result could also round partial sums to 16 bits (torch's ``allow_bf16_reduced_precision_reduction``).
    """
    if left.dtype == right.dtype == out.dtype == dtype:
        torch.mm(left, right, out=out)
        return
    step = max(_SMALLEST_BLOCK, tile_bytes // (3 * dtype.itemsize * out.shape[1]))
    for start in range(0, out.shape[0], step):
        part = slice(start, start + step)
        out[part] = wide_product(left[part], right, dtype)


@dataclass(frozen=True)
class LogitTransform:
    """The transform of raw logits, ``cap * tanh(scale * z / cap)``; without the tanh if ``softcap`` is None."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Return the transformed logits, differentiable by autograd."""
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform a tile of logits in place, without autograd."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def derivative(self, logits: Tensor) -> Tensor | float:
        """Return d(transformed)/d(raw), computed from the *transformed* logits; a number if it is constant."""
        if self.softcap is None:
            return self.scale
        slope = (logits / self.softcap).square_()
        torch.sub(slope.new_ones(()), slope, out=slope)
        return slope if self.scale == 1.0 else slope.mul_(self.scale)
