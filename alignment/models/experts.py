"""Experts in 4 bits: pack those of a mixture of experts, and multiply with them.

transformers stores all experts of a layer in one parameter per projection, which bitsandbytes does not quantize. Here
it is packed while the checkpoint is loaded, with the blocks and constants of ``bitsandbytes.nn.Linear4bit``. A product
dequantizes a few experts at a time, in the forward pass and again in the backward pass, and keeps none of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alignment.internals.transformers import quantized_names
from alignment.internals.transformers_experts import experts_modules, grouped_product, register_experts
from alignment.models.architectures import is_mixture

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit

EXPERT_BYTES = 256 * 2**20  # of dequantized weights that exist at a time, or of one expert if it has more
IMPLEMENTATION = "dequantized_in_groups"
BLOCK = 64  # elements per quantization constant


def quantizable(model: PreTrainedModel, config: BitsAndBytesConfig) -> list[str]:
    """Return the names of the experts' weights that are quantized while a model without weights is loaded.

    They are (experts, out, in), or (experts, in, out) in some models. Modules named in ``llm_int8_skip_modules`` are
    not included, as for linear layers.
    """
    modules = experts_modules(model)
    return [
        f"{name}.{parameter}"
        for name in quantized_names(model, modules, config)
        for parameter, weight in modules[name].named_parameters(recurse=False)
        if weight.ndim == 3
    ]


def packed_experts(model: nn.Module) -> dict[str, Params4bit]:
    """Return the weights of experts that are quantized, by name."""
    return {
        f"{name}.{parameter}": weight
        for name, module in experts_modules(model).items()
        for parameter, weight in module.named_parameters(recurse=False)
        if is_packed_expert(weight)
    }


def plain_experts(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the weights of experts that are not quantized, by name, whether or not they could be.

    They are those with three dimensions, and those of modules called ``experts``, in which some models stack all
    experts of a layer along the first of two dimensions. Modules that bitsandbytes quantizes or that are no experts in
    any model, such as convolutions, are not included.
    """
    known, stacked = experts_modules(model), is_mixture(model.config)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)) or hasattr(module, "kernel_size"):
            continue
        others = "experts" in name.split(".") and name not in known
        for parameter, weight in module.named_parameters(recurse=False):
            if (stacked and weight.ndim == 3 and min(weight.shape[1:]) > 1) or (others and weight.ndim == 2):
                found[f"{name}.{parameter}"] = weight
    return found


def is_packed_expert(weight: Tensor) -> bool:
    """Return whether a parameter contains packed experts."""
    state = getattr(weight, "quant_state", None)
    return state is not None and len(state.shape) == 3


def scale_bytes(numel: int, nested: bool) -> int:
    """Return the bytes of the quantization constants of ``numel`` weights: an fp32 scale per 64, or nested ones."""
    blocks = -(-numel // BLOCK)
    return blocks + 4 * -(-blocks // 256) + 256 * 4 + 4 if nested else 4 * blocks


def expert_bytes(numel: int, nested: bool) -> int:
    """Return the bytes of packed weights with ``numel`` elements, including their quantization constants."""
    return numel // 2 + scale_bytes(numel, nested)


def pack(weight: Tensor, config: BitsAndBytesConfig) -> Params4bit:
    """Quantize the weights of a layer's experts on their device, a few experts at a time.

    The result is that of ``Params4bit`` for the whole tensor, which needs several copies of it on a CPU, and whose
    kernels count elements in 32 bits.

    Args:
        weight: (experts, out, in) or (experts, in, out), with a multiple of :data:`BLOCK` elements per expert.
        config: how to quantize them.
    """
    from bitsandbytes import functional
    from bitsandbytes.nn import Params4bit

    kind, storage = config.bnb_4bit_quant_type, config.bnb_4bit_quant_storage
    parts = [
        functional.quantize_4bit(one.contiguous(), blocksize=BLOCK, quant_type=kind, quant_storage=storage)
        for one in weight.split(at_once(weight.shape, weight.dtype))
    ]
    nested = bool(config.bnb_4bit_use_double_quant)
    scales, offset, second = torch.cat([state.absmax for _, state in parts]), None, None
    if nested:
        offset = scales.mean()
        scales, second = functional.quantize_blockwise(scales - offset, blocksize=256)
    state = functional.QuantState(
        scales, weight.shape, parts[0][1].code, BLOCK, kind, weight.dtype, offset=offset, state2=second
    )
    packed = torch.cat([data for data, _ in parts])
    return Params4bit(packed, False, state, BLOCK, nested, kind, storage, bnb_quantized=True)


def rounded(weight: Tensor, config: BitsAndBytesConfig) -> nn.Parameter:
    """Replace weights by those that quantized ones compute with, in place; arguments as in :func:`pack`."""
    packed, size = pack(weight, config), at_once(weight.shape, weight.dtype)
    for first in range(0, weight.shape[0], size):
        last = min(first + size, weight.shape[0])
        weight[first:last] = unpack(packed, first, last)
    return nn.Parameter(weight, requires_grad=False)


def unpack(weight: Params4bit, first: int, last: int) -> Tensor:
    """Return the experts from ``first`` to ``last``, exclusive, in the dtype from which they were quantized."""
    from bitsandbytes import functional

    state = weight.quant_state
    experts, *shape = state.shape
    rows, blocks = weight.shape[0] // experts, math.prod(shape) // BLOCK
    scales, shape = _scales(state, first * blocks, last * blocks), torch.Size([last - first, *shape])
    part = functional.QuantState(scales, shape, state.code, BLOCK, state.quant_type, state.dtype)
    found: Tensor = functional.dequantize_4bit(weight.data[first * rows : last * rows], part)
    return found


def _scales(state: Any, first: int, last: int) -> Tensor:
    """Return the fp32 scales of the blocks from ``first`` to ``last``, exclusive."""
    from bitsandbytes import functional

    if not state.nested:
        scales: Tensor = state.absmax[first:last]
        return scales
    size = state.state2.blocksize
    begin = first // size  # nested blocks may contain the end of one expert and the beginning of the next
    second = functional.QuantState(
        state.state2.absmax[begin : -(-last // size)], code=state.state2.code, blocksize=size, dtype=state.state2.dtype
    )
    whole = functional.dequantize_blockwise(state.absmax[begin * size : last], second)
    return whole[first - begin * size :] + state.offset


def at_once(shape: torch.Size, dtype: torch.dtype) -> int:
    """Return the number of experts whose dequantized weights fit the limit, at least 1."""
    return max(1, EXPERT_BYTES // (shape[1:].numel() * dtype.itemsize))


class _Product(torch.autograd.Function):
    """The product of rows with frozen, packed experts. Only the rows get a gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Params4bit, offs: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(offs)  # not the weight: activation offloading would copy it
        ctx.weight, ctx.transposed = weight, transposed
        return _multiplied(rows, weight, offs, transposed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (offs,) = ctx.saved_tensors
        return _multiplied(grad.contiguous(), ctx.weight, offs, not ctx.transposed), None, None, None


def _product(rows: Tensor, weight: Any, offs: Tensor, transposed: bool) -> Tensor:
    """(S, in), packed experts, (experts,) -> (S, out); ``transposed``: the experts are (experts, in, out)."""
    return _Product.apply(rows.to(weight.quant_state.dtype), weight, offs, transposed)  # type: ignore[no-any-return,no-untyped-call]


def _multiplied(rows: Tensor, weight: Params4bit, offs: Tensor, transposed: bool) -> Tensor:
    """Multiply rows that are sorted by expert, group by group."""
    shape = weight.quant_state.shape
    ends = [0, *offs.tolist()]
    output = rows.new_empty(rows.shape[0], shape[2] if transposed else shape[1])
    for first, last in _groups(ends, at_once(shape, rows.dtype)):
        begin, end = ends[first], ends[last]
        stack = unpack(weight, first, last)
        stack = stack if transposed else stack.mT
        output[begin:end] = grouped_product(rows[begin:end], stack, offs[first:last] - begin)
        del stack  # before the next group is dequantized
    return output


def _groups(ends: list[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of each group of at most ``size`` consecutive experts that all have rows."""
    for used, run in itertools.groupby(range(len(ends) - 1), key=lambda expert: ends[expert] < ends[expert + 1]):
        experts = [*run] if used else []
        for place in range(0, len(experts), size):
            group = experts[place : place + size]
            yield group[0], group[-1] + 1


register_experts(IMPLEMENTATION, is_packed_expert, _product)
