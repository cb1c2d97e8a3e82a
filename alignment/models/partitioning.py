"""Partition models over the ranks for ZeRO-3, and gather the weights of frozen ones layer by layer.

A model that is loaded for ZeRO-3 is partitioned while it is read. A live model, or a copy of it, is not; DeepSpeed
would move all of it to the device before partitioning it, and a model that needs ZeRO-3 may not fit there.

DeepSpeed installs hooks on every module that has weights, more than ten per decoder layer, and for a small model they
take longer than the forward pass. All weights of a leaf module are fetched together, with hooks on the layer only:
the decoder layers of frozen models are marked as such.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from transformers import PreTrainedModel

from alignment.config.deepspeed_keys import value_at
from alignment.internals.deepspeed_state import whole_shape
from alignment.internals.deepspeed_zero3 import forget_leaf, is_partitioned

# The dtypes that an engine casts to its own. Packed weights have other dtypes and are not cast.
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def partitions(ds_config: dict[str, Any]) -> bool:
    """Return whether an engine with this configuration partitions the weights (ZeRO stage 3)."""
    return bool(ds_config.get("zero_optimization", {}).get("stage", 0) == 3)


def partition_whole(module: nn.Module, ds_config: dict[str, Any], device: torch.device) -> None:
    """Partition the parameters of a module and move its buffers to the device; collective.

    Each parameter is cast to the engine's dtype in place, moved to the device and reduced to this rank's shard before
    the next one is moved. Tied parameters remain tied, and rank 0's values are used, as in an engine. A module that is
    already partitioned, even in part, is not changed.

    Args:
        module: the module that the engine will wrap, on the host or on a device.
        ds_config: configuration of that engine; nothing is done unless its ZeRO stage is 3.
        device: this rank's device.
    """
    if not partitions(ds_config) or any(map(is_partitioned, module.parameters())):
        return
    dtype = _engine_dtype(ds_config)
    for parameter in module.parameters():
        if dtype is not None and parameter.dtype in _CAST and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=module, config_dict_or_path=copy.deepcopy(ds_config))
    module.to(device)  # parameters are empty now; packed ones move their quantization state


def _engine_dtype(ds_config: dict[str, Any]) -> torch.dtype | None:
    """Return the dtype to which an engine casts parameters, or None if it does not cast them."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(section, {}).get("enabled", False):
            return dtype
    return None


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
