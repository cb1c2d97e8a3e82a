"""FlashAttention's functions as called by transformers, in plain torch on a CPU, with the kernels' restrictions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.generation.continuous_batching import initialization


class Calls:
    """The number of calls of each function, and the lengths of sequences decoded from pages."""

    def __init__(self) -> None:
        self.whole = 0
        self.varlen = 0
        self.decoded: list[int] = []


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attend with (Q, heads, D) queries, the last ones of (K, groups, D) keys and values."""
    behind = key.shape[0] - query.shape[0]
    mask = torch.ones(query.shape[0], key.shape[0], dtype=torch.bool).tril(behind)
    found = scaled_dot_product_attention(
        *(part.transpose(0, 1)[None] for part in (query, key, value)), attn_mask=mask, scale=scale, enable_gqa=True
    )
    return found[0].transpose(0, 1)


def functions(version: int, calls: Calls) -> tuple[Any, ...]:
    """Return the functions that transformers' lazy import finds for a version of FlashAttention."""

    def whole(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        calls.whole += 1
        return torch.stack([attend(*row, softmax_scale) for row in zip(q, k, v, strict=True)])

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        calls.varlen += 1
        rows, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        result = torch.zeros_like(q)
        for begin, end, first, last in zip(rows, rows[1:], keys, keys[1:]):
            if end > begin:
                result[begin:end] = attend(q[begin:end], k[first:last], v[first:last], softmax_scale)
        return result

    def with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor,
        v: Tensor,
        cache_seqlens: Tensor,
        block_table: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        page = k_cache.shape[1]
        if version == 2 and page % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        result = torch.zeros_like(q)
        for row, length in enumerate(cache_seqlens.tolist()):
            number, place = divmod(length, page)
            assert number < block_table.shape[1], "the sequence is longer than its block table"
            blocks = block_table[row, : number + 1].long()
            k_cache[blocks[-1], place], v_cache[blocks[-1], place] = k[row, 0], v[row, 0]
            past = (cache[blocks].flatten(0, 1)[: length + 1] for cache in (k_cache, v_cache))
            result[row] = attend(q[row], *past, softmax_scale)
            calls.decoded.append(length)
        return result

    return whole, varlen, with_kvcache, None, None


@contextlib.contextmanager
def flash_attention(model: PreTrainedModel, version: int) -> Iterator[Calls]:
    """Use FlashAttention within this context, which transformers considers available."""
    calls, before = Calls(), model.config._attn_implementation
    utils = modeling_flash_attention_utils
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(utils, "_lazy_imports", lambda *_, **__: functions(version, calls)))
        stack.enter_context(mock.patch.object(utils, "_loaded_implementation", None))
        # The other one of the two checks of transformers would look for CUDA graphs.
        requested = initialization.is_flash_attention_requested
        stack.enter_context(mock.patch.object(initialization, "is_torch_xpu_available", lambda: True))
        stack.enter_context(
            mock.patch.object(
                initialization,
                "is_flash_attention_requested",
                lambda config, version=None: requested(config, version=[2, 3] if version == 2 else version),
            )
        )
        model.config._attn_implementation = f"flash_attention_{version}"
        stack.callback(setattr, model.config, "_attn_implementation", before)
        yield calls
