"""Compute a tile with the Triton kernels: one read for its statistics, one read and write for its coefficients.

The functions are those of ``plain``. 16-bit coefficients are written over the logits, so no second tile is allocated.
A target outside the vocabulary has a log-prob of NaN, whereas torch operations raise an error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alignment.models.tiles import kernels
from alignment.models.tiles.plain import TileScores
from alignment.models.tiles.products import LogitTransform, coefficient_dtype, wide_product

_BLOCK = 4096  # logits of a row per iteration: 16 for each of the 256 threads
WARPS = 8


class Measured(NamedTuple):
    """Results of one read of the logits, (C,) fp32 each. Without statistics, the last three are undefined."""

    logps: Tensor
    lse: Tensor
    largest: Tensor
    total: Tensor
    entropy: Tensor
    mean: Tensor
    top1: Tensor


def block_of(columns: int) -> int:
    """Return the number of logits of a row that a program processes per iteration, a power of two."""
    return min(_BLOCK, max(16, 1 << (columns - 1).bit_length()))


def _transform_arguments(transform: LogitTransform) -> tuple[tuple[float, float], dict[str, bool]]:
    """Return the parameters of a transform as kernel arguments, and flags for those in use."""
    capped = transform.softcap is not None
    return (transform.scale, transform.softcap or 1.0), {"SCALED": transform.scale != 1.0, "CAPPED": capped}


def measure(logits: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform, stats: bool) -> Measured:
    """Compute statistics of (C, V) fp32 raw logits, whose rows may be strided, in one read."""
    out = logits.new_empty((kernels.OUTPUTS, logits.shape[0]))
    if logits.shape[0]:
        numbers, flags = _transform_arguments(transform)
        with torch.cuda.device_of(logits):
            kernels.measure[(logits.shape[0],)](
                logits,
                logits.stride(0),
                logits if bias is None else bias.contiguous(),
                targets.contiguous(),
                out,
                out.stride(0),
                logits.shape[1],
                *numbers,
                **flags,
                HAS_BIAS=bias is not None,
                STATS=stats,
                BLOCK=block_of(logits.shape[1]),
                num_warps=WARPS,
            )
    return Measured(*out)


def differentiate(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    shift: Tensor,
    transform: LogitTransform,
    dtype: torch.dtype,
    total: Tensor | None = None,
    grad: Tensor | None = None,
) -> Tensor:
    """Turn (C, V) fp32 raw logits into coefficients of ``dtype`` (fp32 or 16 bits) in the same memory.

    Args:
        logits: overwritten; rows may be strided.
        bias: (V,) or None.
        targets: (C,) int64; a target outside [0, V) has no entry in its row.
        shift: (C,); ``exp(logit - shift) / total`` is the probability.
        transform: scale and soft cap.
        dtype: dtype of the coefficients.
        total: (C,); None: 1.
        grad: (C,) factors of the rows; None: 1.

    Returns:
        (C, V) in ``dtype``: a view with the row stride in bytes of the logits.
    """
    columns = logits.shape[1]
    coefficients = logits if dtype == logits.dtype else logits.view(dtype)[:, :columns]
    if logits.shape[0]:
        numbers, flags = _transform_arguments(transform)
        with torch.cuda.device_of(logits):
            kernels.differentiate[(logits.shape[0],)](
                logits,
                logits.stride(0),
                logits if bias is None else bias.contiguous(),
                targets.contiguous(),
                shift,
                shift if total is None else total,
                shift if grad is None else grad,
                coefficients,
                coefficients.stride(0),
                columns,
                *numbers,
                **flags,
                HAS_BIAS=bias is not None,
                HAS_TOTAL=total is not None,
                HAS_GRAD=grad is not None,
                BLOCK=block_of(columns),
                num_warps=WARPS,
            )
    return coefficients


def score_tile(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    jacobian: bool,
    stats: bool,
) -> TileScores:
    """(C, H) hidden, (V, H) weight, (V,) bias or None, (C,) targets -> log-probs and the other requested results."""
    logits = wide_product(hidden, weight.t(), torch.float32)
    found = measure(logits, bias, targets, transform, stats)
    rows = None
    if jacobian:
        dtype = coefficient_dtype(weight, torch.float32)
        coefficients = differentiate(logits, bias, targets, found.largest, transform, dtype, total=found.total)
        rows = wide_product(coefficients, weight, torch.float32).to(hidden.dtype)
    measured = torch.stack((found.entropy, found.mean, found.top1)) if stats else None
    return TileScores(found.logps, found.lse, rows, measured)


def head_coefficients(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    transform: LogitTransform,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """See ``plain``. The gradient of a bias sums coefficients that are already rounded to ``dtype``."""
    coefficients = differentiate(logits, bias, targets, lse, transform, dtype, grad=grad.contiguous())
    return coefficients, None if bias is None else coefficients.sum(0, dtype=torch.float32)
