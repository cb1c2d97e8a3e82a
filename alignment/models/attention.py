"""Attention: its mask without looking at the tokens, and its kernels.

On a GPU it is computed by torch's ``scaled_dot_product_attention`` (SDPA), without its math kernel where possible.
The math kernel supports everything, but stores a (T, T) matrix per head. Scoring passes no mask, and transformers then
lets SDPA share the keys of grouped queries, which FlashAttention supports but the memory-efficient kernel does not:
before Ampere, and in fp32, only the math kernel would be left. There, keys and values are expanded instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from alignment.internals.transformers import deciding_on_packing, limit_grouped_queries

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _MathKernel(TorchFunctionMode):
    """Collects the dtypes of calls for which only the math kernel can be used."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            self._look(**dict(zip(_ARGUMENTS, args)), **kwargs)
        return func(*args, **kwargs)

    def _look(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        enable_gqa: bool = False,
        **_: Any,
    ) -> None:
        call = SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
        if not (can_use_flash_attention(call) or can_use_efficient_attention(call) or can_use_cudnn_attention(call)):
            self.dtypes.add(query.dtype)


def _flash_supports(key: Tensor) -> bool:
    """Whether FlashAttention supports these keys, and values and queries like them."""
    return bool(can_use_flash_attention(SDPAParams(key, key, key, None, 0.0, True, True)))


@contextlib.contextmanager
def without_math_kernel(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Expand grouped keys where necessary, from now on; on a CPU, nothing is done.

    If forward passes of the model within this context use the math kernel all the same, rank 0 prints a line.
    """
    if device.type != "cuda":
        yield
        return
    limit_grouped_queries(_flash_supports)
    with _MathKernel() as found:
        yield
    if found.dtypes and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(
            f"attention: {type(model).__name__} in {', '.join(str(dtype)[6:] for dtype in found.dtypes)} uses SDPA's "
            "math kernel on this GPU, whose memory grows with the square of the sequence length; set another dtype or "
            "attn_implementation",
            flush=True,
        )


class PackingCheck:
    """Lets transformers inspect a model's positions until they are known not to depend on the tokens.

    Positions that are expanded over the rows are derived from the shape alone, so they never describe packed
    sequences. If a model derives them from the tokens, they are inspected in every forward pass.

    Attributes:
        shared: whether a forward pass with several rows had the same positions for all of them.
    """

    def __init__(self) -> None:
        self.shared = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Wrap a forward pass without an attention mask, and its backward pass, which may recompute it."""
        with deciding_on_packing(self._decide, lambda: self.shared):
            yield

    def _decide(self, positions: Tensor, look: Callable[[Tensor], Tensor | None]) -> Tensor | None:
        if self.shared:
            return None
        found = look(positions)
        self.shared = found is None and positions.shape[0] > 1 and positions.stride(0) == 0
        return found
