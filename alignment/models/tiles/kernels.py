"""Triton kernels for a tile of fp32 logits: one computes statistics, one replaces logits with coefficients in place.

They are only imported if they are used (``choice``). Each program processes one row, from left to right. Row offsets
are 64-bit because a slice of the head's gradient may have more than 2^31 entries.
"""

from __future__ import annotations

import triton
import triton.language as tl

OUTPUTS = 7  # rows of the output of `measure`, in the order of `fused.Measured`


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """Use the Taylor series below 0.2, where ``1 - exp`` would lose precision. NaN stays NaN."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _transformed(logits, scale, softcap, SCALED: tl.constexpr, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the model's logits and the tanh of the soft cap (0 without a soft cap)."""
    if SCALED:
        logits = logits * scale
    bent = logits * 0.0
    if CAPPED:
        bent = _tanh(logits / softcap)
        logits = bent * softcap
    return logits, bent


@triton.jit
def measure(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride,
    bias_ptr,
    targets_ptr,
    out_ptr,
    out_stride,
    columns,
    scale,
    softcap,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute maximum, sum, log-prob and statistics of a row in one read.

    The sum and the expected logit are relative to the largest logit so far. If all logits of a row are -inf, or one is
    +inf or NaN, its log-probs are NaN, as with torch operations.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    expected = tl.zeros((), tl.float32)
    plain_sum = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < columns
        logits = tl.load(row_ptr + column, mask=there, other=0.0)
        if HAS_BIAS:
            logits += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
        logits, _ = _transformed(logits, scale, softcap, SCALED, CAPPED)
        if STATS:
            plain_sum += tl.sum(tl.where(there, logits, 0.0), axis=0)
        logits = tl.where(there, logits, float("-inf"))
        so_far = tl.maximum(largest, tl.max(logits, axis=0))
        shift = tl.where(so_far == float("-inf"), 0.0, so_far)  # -inf - -inf is NaN
        parts = tl.exp(logits - shift)
        fall = tl.exp(largest - shift)
        if STATS:
            # A probability of 0 times a logit of -inf is defined as 0, the limit.
            moved = expected + tl.where(total > 0.0, largest - shift, 0.0) * total
            expected = fall * moved + tl.sum(parts * tl.where(parts > 0.0, logits - shift, 0.0), axis=0)
        total = total * fall + tl.sum(parts, axis=0)
        largest = so_far
    target = tl.load(targets_ptr + row)
    known = (target >= 0) & (target < columns)
    chosen = tl.load(row_ptr + target, mask=known, other=float("nan"))
    if HAS_BIAS:
        chosen += tl.load(bias_ptr + target, mask=known, other=0.0).to(tl.float32)
    chosen, _ = _transformed(chosen, scale, softcap, SCALED, CAPPED)
    lse = largest + tl.log(total)
    out = out_ptr + row
    tl.store(out, chosen - lse)
    tl.store(out + out_stride, lse)
    tl.store(out + 2 * out_stride, largest)
    tl.store(out + 3 * out_stride, total)
    if STATS:
        tl.store(out + 4 * out_stride, tl.log(total) - expected / total)
        tl.store(out + 5 * out_stride, plain_sum / columns)
        number = (total == total) | (largest == float("inf"))  # the maximum of a row with NaN may ignore the NaN
        tl.store(out + 6 * out_stride, tl.where(number & (chosen >= largest), 1.0, 0.0))


@triton.jit
def differentiate(  # type: ignore[no-untyped-def]
    logits_ptr,
    stride,
    bias_ptr,
    targets_ptr,
    shift_ptr,
    total_ptr,
    grad_ptr,
    out_ptr,
    out_stride,
    columns,
    scale,
    softcap,
    SCALED: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TOTAL: tl.constexpr,
    HAS_GRAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute ``(onehot - exp(z - shift) / total) * slope * grad`` of a row in one read and one write.

    ``out_ptr`` may be the same memory with 16-bit entries. Entry j then overwrites half of logit j / 2, so a program
    must read all logits of a block before it writes the block's coefficients.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    target = tl.load(targets_ptr + row)
    shift = tl.load(shift_ptr + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < columns
        logits = tl.load(row_ptr + column, mask=there, other=0.0)
        tl.debug_barrier()
        if HAS_BIAS:
            logits += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
        logits, bent = _transformed(logits, scale, softcap, SCALED, CAPPED)
        probabilities = tl.exp(logits - shift)
        if HAS_TOTAL:
            probabilities = probabilities / tl.load(total_ptr + row)
        found = tl.where(column == target, 1.0, 0.0) - probabilities
        if CAPPED:
            found = found * (1.0 - bent * bent)
        if SCALED:
            found = found * scale
        if HAS_GRAD:
            found = found * tl.load(grad_ptr + row)
        tl.store(out_ptr + row * out_stride + column, found.to(out_ptr.dtype.element_ty), mask=there)
