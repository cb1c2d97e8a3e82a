"""The weights of a model by kind, counted on torch's meta device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from alignment.models.adapters.record import Adapters
from alignment.models.adapters.skeleton import known_skeleton
from alignment.models.experts import scale_bytes
from alignment.models.partitioning import decoder_layers
from alignment.models.quantization import convertible
from alignment.models.source import ModelSource


@dataclass(frozen=True)
class Weights:
    """The weights of a model, in bytes unless said otherwise.

    Attributes:
        plain: weights in the compute dtype.
        packed: quantized weights.
        constants: quantization constants.
        adapters: adapters, and modules that are trained in full beside them.
        numel: number of parameters without adapters.
        trained: number of trained parameters; 0 for a frozen model.
        widest: number of elements of the largest tensor.
        read: number of elements that exist while a tensor is read and quantized: those of the largest one, or twice
            those of a layer's experts, which are assembled from a tensor per expert; 0 if none is quantized.
        layer: number of parameters of the largest decoder layer.
        layers: number of decoder layers.
    """

    plain: int
    packed: int
    constants: int
    adapters: int
    numel: int
    trained: int
    widest: int
    read: int
    layer: int
    layers: int

    @property
    def base(self) -> int:
        """Bytes without adapters."""
        return self.plain + self.packed + self.constants

    def placed(self, placement: str, ranks: int) -> float:
        """Return the bytes on each GPU of a frozen model, see :mod:`alignment.engines.placement`."""
        return self.base * {"replica": 1.0, "sharded": 1 / ranks, "offload": 0.0}[placement]

    def parts(self, share: float = 1.0) -> dict[str, float]:
        """Return the bytes by part, of a share of all weights."""
        found = {
            "weights": self.plain + self.packed,
            "quantization constants": self.constants,
            "adapters": self.adapters,
        }
        return {name: size * share for name, size in found.items() if size}


def weights_of(
    source: ModelSource, dtype: torch.dtype, adapters: Adapters | None = None, *, trained: bool = False
) -> Weights | None:
    """Count a model's weights; return None if that is not possible.

    A model object is counted by its configuration, because packed weights have other shapes.

    Args:
        source: the model, with its quantization.
        dtype: compute dtype.
        adapters: the adapters to train.
        trained: whether the model is trained, in full without ``adapters``.
    """
    model = known_skeleton(source)
    if model is None:
        return None
    packed, stacks = set[nn.Parameter](), set[nn.Parameter]()
    plan = source.quantization
    if plan is not None:
        packed = {module.get_parameter("weight") for module in convertible(model, plan)}
        stacks = {model.get_parameter(name) for name in plan.packed_experts}
    read = max([*(one.numel() for one in packed), *(2 * one.numel() for one in stacks)], default=0)
    packed |= stacks
    parameters = set(model.parameters())
    packed_numel = sum(parameter.numel() for parameter in packed)
    numel = sum(parameter.numel() for parameter in parameters)
    layers = decoder_layers(model)
    constants = 0
    if plan is not None and plan.bits == 4:
        nested = bool(plan.config.bnb_4bit_use_double_quant)
        constants = sum(scale_bytes(parameter.numel(), nested) for parameter in packed)
    elif plan is not None:
        constants = sum(4 * parameter.shape[0] for parameter in packed)
    new = 0 if adapters is None else adapters.total - numel
    return Weights(
        plain=(numel - packed_numel) * dtype.itemsize,
        packed=0 if plan is None else packed_numel * plan.bits // 8,
        constants=constants,
        adapters=new * dtype.itemsize,
        numel=numel,
        trained=0 if not trained else numel if adapters is None else adapters.trained,
        widest=max(parameter.numel() for parameter in parameters),
        read=read,
        layer=max(map(_numel, layers), default=0),
        layers=len(layers),
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
