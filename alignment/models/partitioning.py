"""Partition an unpartitioned model over the ranks for ZeRO-3, parameter by parameter.

A model that is loaded for ZeRO-3 is partitioned while it is read. A live model, or a copy of it, is not; DeepSpeed
would move all of it to the device before partitioning it, and a model that needs ZeRO-3 may not fit there.
"""

from __future__ import annotations

import copy
from typing import Any

import deepspeed
import torch
from torch import nn

from alignment.internals.deepspeed_zero3 import is_partitioned

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
