"""Attention within the sequences of a packed row.

The attention function is registered with transformers' ``AttentionInterface`` as :data:`PACKED`. A model gets the
:class:`~alignment.data.layout.Layout` as a keyword argument, which its layers pass on, and no mask, neither one of its
own nor one of transformers: a mask has T x T elements and prevents the use of FlashAttention.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from alignment.data.layout import Layout, Piece

varlen_attn: Callable[..., Any] | None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch before 2.10
    varlen_attn = None
flash_attn_varlen_func: Callable[..., Any] | None
try:
    from flash_attn import flash_attn_varlen_func  # type: ignore[no-redef]
except ImportError:
    flash_attn_varlen_func = None

PACKED = "packed"
_QUERIES = 1024  # maximum number of queries of one mask
_ROPE = ("dynamic", "longrope")  # types that depend on the longest position of a row
_LAYERS = ("full_attention", "sliding_attention")
_OF_TORCH = {"window_size", "scale", "enable_gqa"}
_OF_FLASH_ATTENTION = {"window_size", "softmax_scale", "causal", "softcap"}


class CannotPack(Exception):
    """A model does not compute the sequences of a packed row as it does each on its own; the message says why."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend within the sequences of a packed row.

    Args:
        module: the attention layer.
        query: (1, H, T, D).
        key, value: (1, H_k, T, D) and (1, H_k, T, D_v), where H is a multiple of H_k.
        attention_mask: must be None.
        layout: of the row.
        scaling: factor of the products of queries and keys; None for ``D ** -0.5``.
        dropout: probability with which weights are dropped.
        sliding_window: number of tokens that each token attends to, itself included; None for all before it.
        softcap: bound of the products.
        s_aux: (H,) logits of the sinks, to which each query may attend instead of a token.
        **more: further arguments of the layer.

    Returns:
        (1, T, H, D_v), and None.

    Raises:
        CannotPack: the layer does not pass on the layout, or attends in another way.
    """
    if layout is None:
        raise CannotPack("its layers do not pass on the layout of the sequences")
    if attention_mask is not None or more.get("position_bias") is not None or more.get("is_causal") is False:
        raise CannotPack("its attention is not causal, or has biases of its own")
    if s_aux is None and not dropout and _flash_supports(query, value, softcap):
        return _flash(query, key, value, layout, scaling, sliding_window, softcap), None
    plain, groups = softcap is not None or s_aux is not None, query.shape[1] // key.shape[1]
    if groups > 1 and (plain or query.is_cuda):  # there, no fast kernel has both a mask and shared keys
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    found = []
    for piece in layout.pieces:
        keys, values = _attended(key, piece), _attended(value, piece)
        causal = not plain and not piece.shared and (sliding_window is None or sliding_window >= piece.keys)
        step = piece.keys if causal else _QUERIES
        for start in range(piece.start, piece.stop, step):
            queries = query[:, :, start : min(start + step, piece.stop)]
            first = piece.keys - (piece.stop - start)  # its position in the sequence
            last = first + queries.shape[2]
            begin = 0 if sliding_window is None else max(0, first + 1 - sliding_window)
            part = queries, keys[:, :, begin:last], values[:, :, begin:last]
            mask = None if causal else _mask(range(first, last), range(begin, last), sliding_window, query.device)
            if plain and mask is not None:
                attended = _plain(*part, mask, scaling, dropout, softcap, s_aux)
            else:
                attended = F.scaled_dot_product_attention(
                    *part, mask, dropout, is_causal=causal, scale=scaling, enable_gqa=groups > 1
                )
            found.append(attended.transpose(1, 2))
    return torch.cat(found, 1), None


def _attended(states: Tensor, piece: Piece) -> Tensor:
    """Return the keys or values of a piece: (1, H, keys, D)."""
    own = states[:, :, piece.start : piece.stop]
    return torch.cat([states[:, :, piece.prefix :][:, :, : piece.shared], own], 2) if piece.shared else own


def _mask(queries: range, keys: range, window: int | None, device: torch.device) -> Tensor:
    """Return which keys the queries attend to, by their positions: (queries, keys) bool."""
    distance = torch.arange(queries.start, queries.stop, device=device)[:, None]
    distance = distance - torch.arange(keys.start, keys.stop, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, dropout: float,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with a soft cap or sinks, which SDPA does not have."""
    logits = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~mask, -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], 3)
    weights = F.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(query.dtype)
    return F.dropout(weights[..., : key.shape[2]], dropout, dropout > 0) @ value


def _flash_supports(query: Tensor, value: Tensor, softcap: float | None) -> bool:
    """Return whether there is a kernel for sequences of varying lengths, with sliding windows and grouped keys.

    It is torch's, or with a soft cap that of FlashAttention 2, if that is installed.
    """
    function, names = (varlen_attn, _OF_TORCH) if softcap is None else (flash_attn_varlen_func, _OF_FLASH_ATTENTION)
    if function is None or not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    known = names <= inspect.signature(function).parameters.keys()
    capable = torch.cuda.get_device_capability(query.device) >= (8, 0)
    return known and capable and query.shape[-1] == value.shape[-1] <= 256


def _flash(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scaling: float | None, window: int | None,
    softcap: float | None,
) -> Tensor:  # fmt: skip
    """Attention on a GPU in one call, in which queries are aligned with the last keys of their piece."""
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if layout.keys is not None:
        key, value = key.index_select(0, layout.keys), value.index_select(0, layout.keys)
    most = max(piece.stop - piece.start for piece in layout.pieces), max(piece.keys for piece in layout.pieces)
    given = query, key, value, layout.cu_seqlens, layout.cu_seqlens_k, *most
    seen = (-1 if window is None else window - 1, 0)
    if softcap is None:
        assert varlen_attn is not None
        grouped = query.shape[1] != key.shape[1]
        found: Tensor = varlen_attn(*given, scale=scaling, window_size=seen, enable_gqa=grouped)
    else:
        assert flash_attn_varlen_func is not None
        found = flash_attn_varlen_func(*given, softmax_scale=scaling, causal=True, window_size=seen, softcap=softcap)
    return found[None]


AttentionInterface.register(PACKED, packed_attention)


@contextlib.contextmanager
def recorded_windows() -> Iterator[list[int | None]]:
    """Record the sliding window of each call within this context."""
    windows = []

    def recorded(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        windows.append(sliding_window)
        return packed_attention(*args, sliding_window=sliding_window, **kwargs)

    AttentionInterface.register(PACKED, recorded)
    try:
        yield windows
    finally:
        AttentionInterface.register(PACKED, packed_attention)


def configured_refusal(config: PretrainedConfig) -> str | None:
    """Return why sequences cannot be packed for a model with this configuration; None if the model has to be asked."""
    config = config.get_text_config()
    others = sorted({kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYERS})
    if others:
        return f"it has layers of {', '.join(others)}"
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    types = {str(each.get("rope_type")) for each in (rope, *rope.values()) if isinstance(each, dict)}
    if found := sorted(types & set(_ROPE)):
        return f"its RoPE type {found[0]} depends on the length of the row"
    return None
