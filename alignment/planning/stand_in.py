"""A model without weights that allocates what the real one would: modules and shapes on torch's meta device.

The memory of a pass is counted on it before anything is loaded. Meta tensors have sizes and no values, so a layer of
70B parameters costs nothing, and autograd runs on them without a GPU. Counting on fake tensors of torch takes twice as
long and gives the same. What a GPU allocates differently has a stand-in: 4-bit layers and attention.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, PreTrainedModel

from alignment.data.layout import Group, Layout
from alignment.internals.transformers import chosen_attention, replace_by_4bit, requested_attention
from alignment.internals.transformers_experts import register_experts
from alignment.models.adapters.injection import settle
from alignment.models.adapters.record import Adapters, with_initialization
from alignment.models.architectures import shorten
from alignment.models.experts import at_once, quantizable, scale_bytes
from alignment.models.packed_attention import flash_attn_varlen_func, packed_attention
from alignment.models.quantization import Quantization
from alignment.models.scorer import Scorer
from alignment.models.source import ModelSource
from alignment.models.tiled_mlp import tile_mlps
from alignment.planning.gpu_terms import attention_backward
from alignment.planning.live import tagged

KERNELS = ("flash", "efficient", "math", "cpu")
ROWS = ("padded", "packed", "shared")  # packed without and with prompts that sequences share, whose keys are copied
_NAME = "memory_plan_"  # with kernel and rows: a function that is registered with transformers
_EXPERTS = "memory_plan_experts"


def stand_in(
    source: ModelSource, adapters: Adapters | None, dtype: torch.dtype, layers: int, *, aux_loss: bool = False
) -> Scorer:
    """Build the scorer of a run on torch's meta device, with fewer decoder layers.

    Args:
        source: the model, with its quantization.
        adapters: the adapters to inject; None for a fully trained or a frozen model.
        dtype: dtype of all weights that are not quantized.
        layers: number of decoder layers.
        aux_loss: whether the load-balancing loss of a mixture of experts is computed.
    """
    config = copy.deepcopy(source.config)
    config.__dict__.pop("quantization_config", None)
    shorten(config.get_text_config(), layers)
    config.get_text_config().pad_token_id = None  # otherwise, some models look for its value in their inputs
    with torch.device("meta"):
        model: PreTrainedModel = source.task.auto.from_config(config)
    model.to(dtype)
    packed = source.quantization if source.quantization is not None and source.quantization.bits == 4 else None
    if packed is not None:
        if packed.packed_experts:
            _replace_experts(model, quantizable(model, packed.config))
        replace_by_4bit(model, packed.config)  # as PEFT looks for, before adapters
    tile_mlps(model, source.mlp)
    scorer = source.task.scorer(model, aux_loss)
    if adapters is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weights on the meta device are not initialized
            model.add_adapter(with_initialization(copy.deepcopy(adapters.config), True), adapters.name)
        settle(model, adapters.name, dtype)
    if packed is not None:
        _replace_packed(model, packed, dtype)
    return scorer


class PackedLinear(nn.Module):
    """Allocates like ``bitsandbytes.nn.Linear4bit`` on a GPU: packed bytes, scales, and a full copy in each pass."""

    def __init__(self, linear: Any, quantization: Quantization, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        numel = self.in_features * self.out_features
        self.nested = bool(quantization.config.bnb_4bit_use_double_quant)
        with torch.device("meta"):
            self.weight = nn.Parameter(torch.empty(-(-numel // 2), dtype=torch.uint8), requires_grad=False)
            self.register_buffer("scales", torch.empty(scale_bytes(numel, self.nested), dtype=torch.uint8))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out); see ``bitsandbytes.autograd.MatMul4Bit``."""
        return _PackedProduct.apply(x, self.weight, self.bias, (self.out_features, self.in_features), self.nested)  # type: ignore[no-any-return,no-untyped-call]


def _unpacked(x: Tensor, shape: tuple[int, ...], nested: bool) -> Tensor:
    blocks = -(-math.prod(shape) // 64)
    with tagged("dequantized weights"):
        scales = x.new_empty(blocks if nested else 0, dtype=torch.float32)  # noqa: F841 - exists next to the copy
        return x.new_empty(shape)


class _PackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, int], nested: bool
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.nested = shape, nested
        return nn.functional.linear(x, _unpacked(x, shape, nested), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ _unpacked(grad, ctx.shape, ctx.nested), None, None, None, None


def _replace_packed(model: nn.Module, quantization: Quantization, dtype: torch.dtype) -> None:
    import bitsandbytes as bnb

    for name, module in list(model.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            model.set_submodule(name, PackedLinear(module, quantization, dtype))


def _replace_experts(model: PreTrainedModel, names: list[str]) -> None:
    for name in names:
        module, _, parameter = name.rpartition(".")
        count, first, last = model.get_parameter(name).shape
        packed = torch.empty((count, first, last // 2), dtype=torch.uint8, device="meta")
        setattr(model.get_submodule(module), parameter, nn.Parameter(packed, requires_grad=False))
    model.set_experts_implementation(_EXPERTS)


class _ExpertsProduct(torch.autograd.Function):
    """Allocates like the product in :mod:`alignment.models.experts`, at worst: one group of experts has all rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offs: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(offs)
        ctx.weight, ctx.transposed = weight, transposed
        return _multiplied(rows, weight, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _multiplied(grad, ctx.weight, not ctx.transposed), None, None, None


def _multiplied(rows: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    count, first, last = *weight.shape[:2], 2 * weight.shape[2]
    output = rows.new_empty(rows.shape[0], last if transposed else first)
    stack = _unpacked(rows, (min(count, at_once(torch.Size((count, first, last)), rows.dtype)), first, last), True)
    product = torch.empty_like(output)  # noqa: F841 - exists next to the dequantized weights and the output
    del stack
    return output


def grouped_product(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """(S, in), (experts, in, out), (experts,) -> (S, out): allocates like torch's ``grouped_mm``."""
    return nn.functional.linear(rows, weight.mT[0])


class _Attention(torch.autograd.Function):
    """Allocates like a fused attention kernel: the output and one fp32 value per token and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: str) -> Tensor:
        ctx.kernel = kernel
        output = torch.empty_like(query)
        normalizer = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, normalizer)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        with tagged("attention's backward"):
            temporary = grad.new_empty(attention_backward(ctx.kernel, query, key), dtype=torch.uint8)  # noqa: F841
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attend(
    kernel: str,
    rows: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: (B, heads, T, d) -> (B, T, heads, d)."""
    sinks, capped, shared = kwargs.get("s_aux") is not None, kwargs.get("softcap") is not None, rows == "shared"
    if rows != "padded" and (sinks or (capped and flash_attn_varlen_func is None)):  # no kernel: see packed_attention
        batch, _, tokens, _ = query.shape
        query, key, value = (each.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for each in (query, key, value))
        lengths = [tokens] + [tokens + shared] * (batch - 1)  # with a prefix of one token, as many as there are
        layout = Layout.of(lengths, [Group(tuple(range(batch)), 1)] if shared else [])
        found, _ = packed_attention(module, query, key, value, None, layout=layout, scaling=scaling, **kwargs)
        return found.view(batch, tokens, *found.shape[2:]), None
    if shared:
        key, value = key.clone(), value.clone()
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and kernel in ("efficient", "math"):  # these kernels have no grouped queries
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    if kernel == "math":
        with sdpa_kernel(SDPBackend.MATH):
            output = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    else:
        output = _Attention.apply(query, key, value, kernel)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


def attention_of(model: PreTrainedModel, kernel: str, rows: str) -> str:
    """Return the attention that allocates as a run's: eager if requested or, for padded rows, if there is no other."""
    used = chosen_attention(model.config) if rows == "padded" else requested_attention(model)
    return "eager" if used == "eager" else f"{_NAME}{kernel}_{rows}"


for _kernel in KERNELS:
    for _rows in ROWS:
        AttentionInterface.register(f"{_NAME}{_kernel}_{_rows}", functools.partial(_attend, _kernel, _rows))

register_experts(_EXPERTS, lambda weight: weight.dtype == torch.uint8, _ExpertsProduct.apply)
