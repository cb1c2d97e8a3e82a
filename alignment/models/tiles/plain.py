"""Compute a tile with torch operations: on any device and in any dtype, and as the reference for the kernels.

On a GPU these operations are bound by memory bandwidth, so the number of passes over the tile determines the time:
``benchmarks/head.py`` counts them, and a test checks the count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alignment.models.tiles.products import LogitTransform, coefficient_dtype, wide_product

_STATS_ROWS = 32  # rows of a tile for which p * log(p) is computed at a time


class TileScores(NamedTuple):
    """The results for a tile of C tokens, in fp32 (fp64 for fp64 input) except the Jacobian.

    Attributes:
        logps: (C,) log-probs of the targets.
        lse: (C,) log-sum-exps.
        jacobian: (C, H) d logp / d hidden in the dtype of the hidden states; None unless requested.
        stats: (3, C) entropy, mean logit, whether the target was the most likely token; None unless requested.
    """

    logps: Tensor
    lse: Tensor
    jacobian: Tensor | None
    stats: Tensor | None


def _finished(logits: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    """Turn the product's raw logits into the model's logits, in place."""
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
    """(C, H) hidden, (V, H) weight, (V,) bias or None, (C,) targets -> log-probs and the other requested results."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = _finished(wide_product(hidden, weight.t(), wide), bias, transform)
    chosen = logits.gather(1, targets[:, None])
    slope = transform.derivative(logits) if jacobian else 1.0
    largest = logits.amax(1, keepdim=True)
    mean = logits.mean(1) if stats else None
    # exp in place: the tile becomes the unnormalized probabilities, and no second tile is allocated.
    total = logits.sub_(largest).exp_().sum(1, keepdim=True)
    lse = largest + total.log()
    logps = (chosen - lse)[:, 0]
    # For linear logits, the expected logit is h . E[W] = z[y] - h . J, so the entropy is almost free if J is known.
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


def _entropy(unnormalized: Tensor, total: Tensor) -> Tensor:
    """(C,) entropies in nats from exp(z - max) (C, V) and its row sums (C, 1), without a second tile."""
    parts = unnormalized.split(_STATS_ROWS)
    expected = torch.cat([torch.xlogy(part, part).sum(1) for part in parts]) / total[:, 0]
    return total.log()[:, 0] - expected


def _place_for(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the output of the last operation on a tile: the tile itself, or a narrower one, which saves a cast."""
    return tile if tile.dtype == dtype else torch.empty_like(tile, dtype=dtype)


def _coefficients(
    unnormalized: Tensor, total: Tensor, targets: Tensor, slope: Tensor | float, dtype: torch.dtype
) -> Tensor:
    """(C, V) ``(onehot - p) * slope`` in ``dtype``, from exp(z - max) (C, V), which is overwritten."""
    column = targets[:, None]
    # The target's coefficient is computed separately, so that the others need neither an addition nor a cast.
    at_target = unnormalized.gather(1, column).div_(-total).add_(1)
    if isinstance(slope, Tensor):
        at_target.mul_(slope.gather(1, column))
    else:
        at_target.mul_(slope)
    if isinstance(slope, Tensor) or slope != 1.0:
        unnormalized.div_(-total)
        coefficients = torch.mul(unnormalized, slope, out=_place_for(unnormalized, dtype))
    else:
        coefficients = torch.div(unnormalized, -total, out=_place_for(unnormalized, dtype))
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
    """Compute the factors of the hidden states in the head's gradient, for a slice of S vocabulary entries.

    Args:
        logits: (N, S) raw logits without bias; overwritten.
        bias: (S,) or None.
        targets: (N,) int64, relative to the slice's first entry; those outside [0, S) belong to other slices.
        lse: (N,) log-sum-exps over the whole vocabulary.
        grad: (N,) gradients of the log-probs.
        transform: scale and soft cap.
        dtype: dtype of the coefficients.

    Returns:
        (N, S) ``grad * d logp / d raw logit``, and their (S,) sums, the gradient of the bias; None without a bias.
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
    # Sum for the bias before rounding.
    place = _place_for(probabilities, dtype if bias is None else probabilities.dtype)
    coefficients = torch.mul(probabilities, -grad[:, None], out=place)
    coefficients.scatter_(1, column, at_column.to(place.dtype))
    return coefficients, None if bias is None else coefficients.sum(0)
