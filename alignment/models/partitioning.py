"""Dividing a whole model over the ranks for ZeRO-3, one parameter after the other.

A model that is loaded for ZeRO-3 is divided as it is read. A live one, or a copy of it, is whole; DeepSpeed would move
it to the device as it is, and divide it there: a model that needs ZeRO-3 has no room for that.
"""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import torch
from torch import nn

from alignment.internals.deepspeed_zero3 import is_partitioned

# What an engine casts to its dtype; packed weights of another type are left as they are.
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def partition_whole(module: nn.Module, ds_config: dict[str, Any], device: torch.device) -> None:
    """Divide the parameters of a module that is whole, and move its buffers to the device; collective.

    Each parameter is cast to the engine's dtype where it lies, moved to the device, and gone from there before the
    next one comes, but for this rank's share. Tied parameters stay one parameter, and the first rank's values count,
    as in an engine. A module of which anything is divided already is left to its engine.

    Args:
        module: what the engine will wrap, on the host or on a device.
        ds_config: of that engine; nothing is done unless its ZeRO stage is 3.
        device: of this rank.
    """
    if ds_config.get("zero_optimization", {}).get("stage", 0) != 3 or any(map(is_partitioned, module.parameters())):
        return
    dtype = _engine_dtype(ds_config)
    for parameter in module.parameters():
        if dtype is not None and parameter.dtype in _CAST and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    deepspeed.zero.Init(module=module, config_dict_or_path=copy.deepcopy(ds_config))
    module.to(device)  # parameters are empty now; packed ones take along what belongs to them


def _engine_dtype(ds_config: dict[str, Any]) -> torch.dtype | None:
    """What an engine casts parameters to; None where it leaves them."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if ds_config.get(section, {}).get("enabled", False):
            return dtype
    return None
