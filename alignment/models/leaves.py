"""Mark the decoder layers of a frozen model as ZeRO-3 leaf modules, so that weights are gathered layer by layer.

DeepSpeed installs hooks on every module that has weights, more than ten per decoder layer, and for a small model they
take longer than the forward pass. All weights of a leaf module are fetched together, with hooks on the layer only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from deepspeed.utils import set_z3_leaf_module
from torch import nn
from transformers import PreTrainedModel

from alignment.config.deepspeed_keys import value_at
from alignment.internals.deepspeed_state import whole_shape
from alignment.internals.deepspeed_zero3 import forget_leaf


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, or an empty list if the model does not keep them in one ``nn.ModuleList``.

    An image encoder may have the same number of layers, and a layer the same number of experts, so the list with the
    most parameters is chosen.
    """
    number = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    return list(max(lists, key=whole_parameters, default=()))


def mark_leaves(model: PreTrainedModel, ds_config: Mapping[str, Any]) -> list[nn.Module]:
    """Mark the layers of a frozen model as leaf modules before its engine is built, and return them.

    No layer is marked below stage 3, or if one has more parameters than ``stage3_max_live_parameters`` allows, as in a
    large mixture of experts.
    """
    if value_at(dict(ds_config), "zero_optimization.stage") != 3:
        return []
    layers = decoder_layers(model)
    most = value_at(dict(ds_config), "zero_optimization.stage3_max_live_parameters")
    if any(most is not None and whole_parameters(layer) > most for layer in layers):
        return []
    for layer in layers:
        set_z3_leaf_module(layer, True)
    return layers


def unmark_leaves(layers: list[nn.Module]) -> None:
    """Undo :func:`mark_leaves`, because a model object passed by the user may be trained afterwards."""
    for layer in layers:
        set_z3_leaf_module(layer, False)
        forget_leaf(layer)


def whole_parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module before partitioning by ZeRO-3."""
    return sum(math.prod(whole_shape(parameter)) for parameter in module.parameters())
