"""Attention to sequences of varying lengths in one call, on a CPU: it allocates what torch's kernel for GPUs returns.

On a CPU, the sequences of a packed row are attended to one after another, and their outputs concatenated; a GPU does
neither. A memory plan is that of a GPU, so a packed row is measured with this function: the output and the log-sum-exp
are saved for the backward pass, which returns three gradients. What computes their values is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from alignment.models import packed_attention

Uncounted = Callable[[], contextlib.AbstractContextManager[None]]
Spans = list[tuple[slice, slice]]


@contextlib.contextmanager
def one_call(uncounted: Uncounted) -> Iterator[None]:
    """Let packed rows attend as on a GPU within this context; what happens within ``uncounted`` is not measured."""

    class Varlen(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: Spans, scale: float | None, window: int
        ) -> Tensor:
            found, sums = torch.empty_like(query), query.new_empty(query.shape[1::-1], dtype=torch.float32)
            with uncounted():
                for rows, keys in spans:
                    found[rows] = _attend(query[rows], key[keys], value[keys], scale, window)
            ctx.save_for_backward(query, key, value, found, sums)
            ctx.how = spans, scale, window
            return found

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            given, (spans, scale, window) = ctx.saved_tensors[:3], ctx.how
            made = [torch.zeros_like(each) for each in given]
            with uncounted(), torch.enable_grad():
                for rows, keys in spans:
                    places = (rows, keys, keys)
                    parts = [each[place].detach().requires_grad_() for each, place in zip(given, places)]
                    attended = _attend(*parts, scale, window)
                    for total, place, part in zip(made, places, torch.autograd.grad(attended, parts, grad[rows])):
                        total[place] += part
            return (*made, None, None, None)

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, 0),
        enable_gqa: bool = False,
    ) -> Tensor:
        starts, firsts = cu_seq_q.tolist(), cu_seq_k.tolist()
        queries, keys = (map(slice, each, each[1:]) for each in (starts, firsts))
        return Varlen.apply(query, key, value, list(zip(queries, keys)), scale, window_size[0])  # type: ignore[no-any-return]

    def supports(query: Tensor, value: Tensor, softcap: float | None) -> bool:
        return softcap is None

    with (
        mock.patch.object(packed_attention, "varlen_attn", varlen_attn),
        mock.patch.object(packed_attention, "_flash_supports", supports),
    ):
        yield


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int) -> Tensor:
    """Attend with (Q, heads, D) queries, the last ones of (K, groups, D) keys, to at most ``window`` keys before."""
    count, total = query.shape[0], key.shape[0]
    distance = torch.arange(total - count, total)[:, None] - torch.arange(total)
    mask = (distance >= 0) if window < 0 else (distance >= 0) & (distance <= window)
    parts = (part.transpose(0, 1)[None] for part in (query, key, value))
    return scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
