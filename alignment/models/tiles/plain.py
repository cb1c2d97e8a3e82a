"""A tile of logits by torch's own operations: everywhere, in any dtype, and the oracle of the kernels.

On a GPU the time of such a tile is that of its passes over memory, so each operation that reads or writes the tile has
to be worth it: ``benchmarks/head.py`` counts them, and a test keeps the count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alignment.models.tiles.products import coefficient_dtype, wide_product
from alignment.models.tiles.transform import LogitTransform

_STATS_ROWS = 32  # rows of a tile whose probabilities are multiplied by their logarithms at once


class TileScores(NamedTuple):
    """What is left of a tile of C tokens, all in fp32 (fp64 for fp64 input) but the jacobian.

    Attributes:
        logps: (C,) log-probs of the targets.
        lse: (C,) log-sum-exps.
        jacobian: (C, H) d logp / d hidden in the dtype of the hidden states; None unless asked for.
        stats: (3, C) entropy, mean logit, whether the target was the likeliest; None unless asked for.
    """

    logps: Tensor
    lse: Tensor
    jacobian: Tensor | None
    stats: Tensor | None


def _finished(logits: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    """The model's logits from those of the product, in place."""
    if bias is not None:
        logits.add_(bias)
    return transform.apply_(logits)


def score_tile(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    jacobian: bool,
    stats: bool,
) -> TileScores:
    """(C, H) hidden, (V, H) weight, (V,) bias or None, (C,) targets -> log-probs and what else is asked for."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = _finished(wide_product(hidden, weight.t(), wide), bias, transform)
    chosen = logits.gather(1, targets[:, None])
    slope = transform.derivative(logits) if jacobian else 1.0
    largest = logits.amax(1, keepdim=True)
    mean = logits.mean(1) if stats else None
    # exp in place: the tile becomes the unnormalised probabilities, and no second tile is allocated.
    total = logits.sub_(largest).exp_().sum(1, keepdim=True)
    lse = largest + total.log()
    logps = (chosen - lse)[:, 0]
    # Of linear logits the expected one is h . E[W] = z[y] - h . J, so the entropy is nearly free where J is there.
    linear = jacobian and transform.softcap is None and bias is None
    entropy = _entropy(logits, total) if stats and not linear else logps
    rows = None
    if jacobian:
        coefficients = _coefficients(logits, total, targets, slope, coefficient_dtype(weight, wide))
        rows = wide_product(coefficients, weight, wide)
        if linear and stats:
            entropy = (hidden * rows).sum(1) - logps
    measured = None if mean is None else torch.stack((entropy, mean, (chosen >= largest)[:, 0].to(mean.dtype)))
    return TileScores(logps, lse[:, 0], None if rows is None else rows.to(hidden.dtype), measured)


def _entropy(unnormalised: Tensor, total: Tensor) -> Tensor:
    """(C,) entropies in nats from exp(z - max) (C, V) and its row sums (C, 1), without a second tile."""
    parts = unnormalised.split(_STATS_ROWS)
    expected = torch.cat([torch.xlogy(part, part).sum(1) for part in parts]) / total[:, 0]
    return total.log()[:, 0] - expected


def _place_for(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the last operation on a tile writes: the tile, or a narrower one, which spares the cast its passes."""
    return tile if tile.dtype == dtype else torch.empty_like(tile, dtype=dtype)


def _coefficients(
    unnormalised: Tensor, total: Tensor, targets: Tensor, slope: Tensor | float, dtype: torch.dtype
) -> Tensor:
    """(C, V) ``(onehot - p) * slope`` in ``dtype``, from exp(z - max) (C, V), which is overwritten."""
    column = targets[:, None]
    # The target's own coefficient is computed apart, so that the others need neither a sum nor a cast of their own.
    at_target = unnormalised.gather(1, column).div_(-total).add_(1)
    if isinstance(slope, Tensor):
        at_target.mul_(slope.gather(1, column))
    else:
        at_target.mul_(slope)
    if isinstance(slope, Tensor) or slope != 1.0:
        unnormalised.div_(-total)
        coefficients = torch.mul(unnormalised, slope, out=_place_for(unnormalised, dtype))
    else:
        coefficients = torch.div(unnormalised, -total, out=_place_for(unnormalised, dtype))
    return coefficients.scatter_(1, column, at_target.to(dtype))


def head_coefficients(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    transform: LogitTransform,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """What the gradient of the head multiplies the hidden states with, for a slice of S vocabulary entries.

    Args:
        logits: (N, S) raw logits, of the product alone; overwritten.
        bias: (S,) or None.
        targets: (N,) int64, counted from the slice's first entry; those outside [0, S) are of other slices.
        lse: (N,) log-sum-exps over the whole vocabulary.
        grad: (N,) gradients of the log-probs.
        transform: scale and soft cap.
        dtype: of the coefficients.

    Returns:
        (N, S) ``grad * d logp / d raw logit``; and their (S,) sums, the gradient of the bias, or None without one.
    """
    logits = _finished(logits, bias, transform)
    slope = transform.derivative(logits)
    probabilities = logits.sub_(lse[:, None]).exp_()
    inside = (targets >= 0) & (targets < logits.shape[1])
    column = targets.clamp(0, logits.shape[1] - 1)[:, None]
    at_column = inside[:, None].to(logits.dtype) - probabilities.gather(1, column)
    if isinstance(slope, Tensor):
        at_column.mul_(slope.gather(1, column))
        probabilities.mul_(slope)
    elif slope != 1.0:
        at_column.mul_(slope)
        probabilities.mul_(slope)
    at_column.mul_(grad[:, None])
    # A bias sums what is not rounded yet.
    place = _place_for(probabilities, dtype if bias is None else probabilities.dtype)
    coefficients = torch.mul(probabilities, -grad[:, None], out=place)
    coefficients.scatter_(1, column, at_column.to(place.dtype))
    return coefficients, None if bias is None else coefficients.sum(0)
