"""Compute per-token log-probs directly from hidden states, one tile of logits at a time.

For logits ``z = f(W h + b)``, the gradient of ``log softmax(z)[y]`` with respect to ``h`` has the size of ``h``. It is
computed and stored while the tile of logits is in memory, so the backward pass of *any* loss on log-probs is a
product, and no tensor of size (tokens x vocabulary) is ever allocated. If the head is trained, the backward pass
recomputes the logits in slices of the vocabulary to compute the gradient of the head, one slice at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from alignment.models.first_part import is_enough
from alignment.models.tiles.choice import tiles_for
from alignment.models.tiles.products import LogitTransform, coefficient_dtype, tile_length, wide_product, write_product

DEFAULT_TILE_BYTES = 256 * 2**20
_AS_THEY_ARE = LogitTransform()


def _tile_starts(count: int, step: int) -> range:
    """Return where the tiles of ``count`` rows begin."""
    return range(min(count, 1)) if is_enough() else range(0, count, step)


class TokenStats(NamedTuple):
    """Statistics of each token's distribution; (N,) each, detached.

    Attributes:
        entropy: in nats.
        logits: mean of the logits over the vocabulary.
        top1: 1.0 if the target was the most likely token, else 0.0.
    """

    entropy: Tensor
    logits: Tensor
    top1: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor, targets: Tensor) -> TokenStats:
        """Compute the statistics from the full (N, V) matrix of transformed logits."""
        logits = logits.detach()
        chosen = logits.gather(1, targets[:, None])[:, 0]
        lse = logits.logsumexp(1)
        expected = (logits.sub(lse[:, None]).exp_() * logits).sum(1)
        return cls(lse - expected, logits.mean(1), (chosen >= logits.amax(1)).to(logits.dtype))


Scored: TypeAlias = tuple[Tensor, TokenStats | None]


class _TokenLogProbs(torch.autograd.Function):
    """(N, H) hidden, (V, H) weight, optional (V,) bias, (N,) targets -> (N,) log-probs, (3, N) or (3, 0) statistics.

    Both are fp32 (fp64 for fp64 input). Only the log-probs are differentiable.
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
        score_tile = tiles_for(hidden).score_tile
        for start in _tile_starts(tokens, step):
            part = slice(start, start + step)
            scored = score_tile(hidden[part], weight, bias, targets[part], transform, jacobian, with_stats)
            logps[part], lse[part] = scored.logps, scored.lse
            if scored.stats is not None:
                stats[:, part] = scored.stats
            if rows is not None and scored.jacobian is not None:
                rows[part] = scored.jacobian
        trained = with_graph and (weight.requires_grad or (bias is not None and bias.requires_grad))
        # Save the Parameter itself, not a detached view: ZeRO-3 gathers it again for the backward pass, whereas a view
        # would keep the first gathered copy alive.
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
    """Compute the gradients of weight (V, H) and bias (V,) in slices of the vocabulary, each entry written once."""
    grad_weight = torch.empty_like(weight)
    grad_bias = None if bias is None else torch.empty_like(bias)
    vocabulary, wide = weight.shape[0], grad.dtype
    tiles, dtype = tiles_for(hidden), coefficient_dtype(hidden, grad.dtype)
    step = tile_length(vocabulary, max(1, hidden.shape[0]), tile_bytes)
    for start in _tile_starts(vocabulary, step):
        part = slice(start, min(start + step, vocabulary))
        logits = wide_product(hidden, weight[part].t(), wide)
        offset = None if bias is None else bias[part]
        coefficients, sums = tiles.head_coefficients(logits, offset, targets - part.start, lse, grad, transform, dtype)
        del logits  # 16-bit coefficients are a copy, unless the kernels wrote them over the logits
        write_product(grad_weight[part], coefficients.t(), hidden, wide, tile_bytes)
        del coefficients  # before the next slice is allocated
        if grad_bias is not None and sums is not None:
            grad_bias[part] = sums
    return grad_weight, grad_bias


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform = _AS_THEY_ARE,
    tile_bytes: int = DEFAULT_TILE_BYTES,
    stats: bool = False,
) -> Scored:
    """Compute ``log softmax(f(hidden @ weight.T + bias))[targets]`` without allocating the (N, V) matrix.

    Args:
        hidden: (N, H) final hidden states, any float dtype; N may be 0.
        weight: (V, H) head weight of the same dtype.
        bias: (V,) or None.
        targets: (N,) int64 token IDs in [0, V).
        transform: scale and soft cap of the model's logits.
        tile_bytes: maximum size of the largest temporary tensor, in bytes.
        stats: whether to compute statistics of each token's distribution.

    Returns:
        (N,) log-probs in fp32 (fp64 for fp64 input), and the statistics or None.
    """
    with_graph = torch.is_grad_enabled()
    logps, measured = _TokenLogProbs.apply(hidden, weight, bias, targets, transform, tile_bytes, with_graph, stats)  # type: ignore[no-untyped-call]
    return logps, TokenStats(*measured) if stats else None


class LogProbHead(nn.Linear):
    """A linear head: ``forward(h)`` returns logits, ``forward(h, targets)`` log-probs (:func:`token_logprobs`)."""

    transform: LogitTransform
    tile_bytes: int

    @classmethod
    def replacing(cls, linear: nn.Linear, transform: LogitTransform, tile_bytes: int) -> LogProbHead:
        """Create a head that shares the Parameters of ``linear``, which may be partitioned."""
        head = cls(1, 1, bias=False, device="meta")
        head.in_features, head.out_features = linear.in_features, linear.out_features
        head.weight, head.bias = linear.weight, linear.bias
        head.transform, head.tile_bytes = transform, tile_bytes
        return head.train(linear.training)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor | None = None, stats: bool = False
    ) -> Tensor | Scored:
        """(..., H) -> raw logits (..., V); with ``targets`` (N,), hidden (N, H) -> log-probs (N,) and statistics."""
        if targets is None:
            return super().forward(hidden)
        return token_logprobs(hidden, self.weight, self.bias, targets, self.transform, self.tile_bytes, stats)
