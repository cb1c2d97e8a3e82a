"""Per-token log-probs straight from hidden states, one tile of the logits at a time.

For logits ``z = f(W h + b)`` the gradient of ``log softmax(z)[y]`` towards ``h`` is one vector as long as ``h``. It is
computed while the tile of logits is still there, and kept: the backward pass of *any* loss built on log-probs is then
a product, and nothing of size (tokens x vocabulary) ever exists. A head that is trained needs its own gradient too:
the backward pass then recomputes the logits, this time in slices of the vocabulary, each finished with one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DEFAULT_TILE_BYTES = 256 * 2**20
_BYTES_PER_LOGIT = 6  # an fp32 logit and a 16-bit copy of its gradient coefficient
_SMALLEST_TILE = 16  # rows; fewer would only multiply the reading of the weight
_STATS_ROWS = 32  # rows of a tile whose probabilities are multiplied by their logarithms at once
_CAST_SLICE = 4096  # vocabulary rows cast to fp32 at once where a product cannot accumulate wider than its input


@dataclass(frozen=True)
class LogitTransform:
    """What a model does to its raw logits: ``cap * tanh(scale * z / cap)``; ``softcap`` None leaves out the tanh."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """The transformed logits, differentiable by autograd."""
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def apply_(self, logits: Tensor) -> Tensor:
        """Transform a tile of logits in place, outside of autograd."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def derivative(self, logits: Tensor) -> Tensor | float:
        """d(transformed)/d(raw), from the *transformed* logits."""
        if self.softcap is None:
            return self.scale
        return (logits / self.softcap).square_().neg_().add_(1).mul_(self.scale)


def tile_length(rows: int, width: int, tile_bytes: int) -> int:
    """How many of ``rows`` to take at once so that a tile of ``width`` columns stays inside ``tile_bytes``.

    Never more than a third of the rows (unless they are few): the whole matrix must not exist, whatever the budget.
    """
    return max(1, min(max(_SMALLEST_TILE, -(-rows // 3)), max(256, tile_bytes // (_BYTES_PER_LOGIT * width))))


def wide_product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left @ right`` with result and accumulation in ``dtype``, (C, K) x (K, M) -> (C, M)."""
    if left.dtype == right.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left.to(right.dtype), right, out_dtype=dtype)
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


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, transform: LogitTransform) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = wide_product(hidden, weight.t(), wide)
    if bias is not None:
        logits.add_(bias)
    return transform.apply_(logits)


class TokenStats(NamedTuple):
    """What is known of each token's distribution besides its log-prob; (N,) each, without graph.

    ``entropy``: in nats. ``logits``: mean of the logits over the vocabulary. ``top1``: 1.0 where the target was the
    likeliest token.
    """

    entropy: Tensor
    logits: Tensor
    top1: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor, targets: Tensor) -> TokenStats:
        """From the whole (N, V) matrix of transformed logits."""
        logits = logits.detach()
        chosen = logits.gather(1, targets[:, None])[:, 0]
        lse = logits.logsumexp(1)
        expected = (logits.sub(lse[:, None]).exp_() * logits).sum(1)
        return cls(lse - expected, logits.mean(1), (chosen >= logits.amax(1)).to(logits.dtype))


class _Tile(NamedTuple):
    """Log-probs and log-sum-exps (C,) of a tile and, if asked for, d logp / d hidden (C, H) and statistics (3, C)."""

    logps: Tensor
    lse: Tensor
    jacobian: Tensor | None
    stats: Tensor | None


def _score_tile(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    jacobian: bool,
    stats: bool,
) -> _Tile:
    logits = _logits(hidden, weight, bias, transform)
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
        rows = _jacobian(logits, total, targets, weight, slope)
        if linear and stats:
            entropy = (hidden * rows).sum(1) - logps
    measured = None if mean is None else torch.stack((entropy, mean, (chosen >= largest)[:, 0].to(mean.dtype)))
    return _Tile(logps, lse[:, 0], None if rows is None else rows.to(hidden.dtype), measured)


def _entropy(unnormalised: Tensor, total: Tensor) -> Tensor:
    """(C,) entropies in nats from exp(z - max) (C, V) and its row sums (C, 1), without a second tile."""
    parts = unnormalised.split(_STATS_ROWS)
    expected = torch.cat([torch.xlogy(part, part).sum(1) for part in parts]) / total[:, 0]
    return total.log()[:, 0] - expected


def _jacobian(unnormalised: Tensor, total: Tensor, targets: Tensor, weight: Tensor, slope: Tensor | float) -> Tensor:
    """(C, H) d logp / d hidden; the tile is overwritten with the coefficients ``onehot - p``."""
    coefficients = unnormalised.div_(-total)
    coefficients.scatter_add_(1, targets[:, None], torch.ones_like(total))
    coefficients.mul_(slope)
    return wide_product(coefficients, weight, coefficients.dtype)


class _TokenLogProbs(torch.autograd.Function):
    """(N, H) hidden, (V, H) weight, optional (V,) bias, (N,) targets -> (N,) log-probs, (3, N) or (3, 0) statistics.

    Both are fp32 (fp64 for fp64 input); only the log-probs have a graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        tile_bytes: int,
        with_graph: bool,
        with_stats: bool,
    ) -> tuple[Tensor, Tensor]:
        tokens = hidden.shape[0]
        jacobian = with_graph and hidden.requires_grad
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logps, lse = hidden.new_empty(tokens, dtype=wide), hidden.new_empty(tokens, dtype=wide)
        stats = hidden.new_empty((3, tokens if with_stats else 0), dtype=wide)
        rows = torch.empty_like(hidden) if jacobian else None
        step = tile_length(tokens, weight.shape[0], tile_bytes)
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            scored = _score_tile(hidden[part], weight, bias, targets[part], transform, jacobian, with_stats)
            logps[part], lse[part] = scored.logps, scored.lse
            if scored.stats is not None:
                stats[:, part] = scored.stats
            if rows is not None and scored.jacobian is not None:
                rows[part] = scored.jacobian
        trained = with_graph and (weight.requires_grad or (bias is not None and bias.requires_grad))
        # The Parameter itself is saved, not a detached view: ZeRO-3 gathers it again for the backward pass, where a
        # view would keep the first gathered copy alive.
        kept = (hidden, weight, bias, targets, lse) if trained else (None,) * 5
        ctx.save_for_backward(rows, *kept)
        ctx.transform, ctx.tile_bytes = transform, tile_bytes
        ctx.mark_non_differentiable(stats)
        return logps, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        rows, hidden, weight, bias, targets, lse = ctx.saved_tensors
        grad_hidden = None if rows is None else (grad[:, None] * rows).to(rows.dtype)
        grad_weight, grad_bias = None, None
        if hidden is not None:
            grad_weight, grad_bias = _head_gradients(
                grad, hidden, weight, bias, targets, lse, ctx.transform, ctx.tile_bytes
            )
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _head_gradients(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    transform: LogitTransform,
    tile_bytes: int,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of weight (V, H) and bias (V,): over slices of the vocabulary, so that each entry is written once."""
    grad_weight = torch.empty_like(weight)
    grad_bias = None if bias is None else torch.empty_like(bias)
    vocabulary = weight.shape[0]
    step = tile_length(vocabulary, max(1, hidden.shape[0]), tile_bytes)
    for start in range(0, vocabulary, step):
        part = slice(start, min(start + step, vocabulary))
        logits = _logits(hidden, weight[part], None if bias is None else bias[part], transform)
        slope = transform.derivative(logits)
        coefficients = logits.sub_(lse[:, None]).exp_().neg_()
        local = targets - part.start
        inside = (local >= 0) & (local < coefficients.shape[1])
        coefficients.scatter_add_(
            1, local.clamp(0, coefficients.shape[1] - 1)[:, None], inside[:, None].to(coefficients.dtype)
        )
        coefficients.mul_(slope).mul_(grad[:, None])
        grad_weight[part] = wide_product(coefficients.t(), hidden, coefficients.dtype)
        if grad_bias is not None:
            grad_bias[part] = coefficients.sum(0)
    return grad_weight, grad_bias


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform = LogitTransform(),
    tile_bytes: int = DEFAULT_TILE_BYTES,
    stats: bool = False,
) -> tuple[Tensor, TokenStats | None]:
    """``log softmax(f(hidden @ weight.T + bias))[targets]`` without the (N, V) matrix, forward or backward.

    Args:
        hidden: (N, H) final hidden states, any float dtype; N may be 0.
        weight: (V, H) head weight of the same dtype.
        bias: (V,) or None.
        targets: (N,) int64 token ids in [0, V).
        transform: scale and soft cap of this model's logits.
        tile_bytes: budget of the largest temporary.
        stats: measure each token's distribution as well.

    Returns:
        (N,) log-probs in fp32 (fp64 for fp64 input), whatever the input dtype; and the statistics, or None.
    """
    with_graph = torch.is_grad_enabled()
    logps, measured = _TokenLogProbs.apply(hidden, weight, bias, targets, transform, tile_bytes, with_graph, stats)  # type: ignore[no-untyped-call]
    return logps, TokenStats(*measured) if stats else None
