"""Decoder layers of a frozen model as ZeRO-3's leaf modules: weights come and go a layer at a time.

DeepSpeed's hooks run around every module that holds weights, over ten in a decoder layer, and take longer than a small
model's forward. The weights of a leaf module are fetched together, so that the layer alone has hooks.
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
    """The layers of the decoder; none where the model keeps them in another way than in one list.

    An image encoder may have as many layers, and a layer as many experts: the list with most parameters is it.
    """
    number = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    return list(max(lists, key=whole_parameters, default=()))


def mark_leaves(model: PreTrainedModel, ds_config: Mapping[str, Any]) -> list[nn.Module]:
    """Make the layers of a model that is only asked leaf modules, before its engine is built; return them.

    Nothing is marked outside of stage 3, or where a layer has more parameters than may be whole at a time
    (``stage3_max_live_parameters``), as one of a large mixture of experts may: it stays as DeepSpeed has it.
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
    """Undo it: a live model may be trained afterwards."""
    for layer in layers:
        set_z3_leaf_module(layer, False)
        forget_leaf(layer)


def whole_parameters(module: nn.Module) -> int:
    """How many parameters a module has, also while ZeRO-3 has divided them."""
    return sum(math.prod(whole_shape(parameter)) for parameter in module.parameters())
