"""Inject adapters into a model: new ones, ones from a folder, and a frozen copy of them.

Adapters are injected into the transformers model itself after its scorer has replaced the head, so that PEFT's copies
of a head (``modules_to_save``) are copies of the replaced head.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.peft import train_adapter
from alignment.internals.transformers import loading
from alignment.models.adapters.record import Adapters, adapter_weights
from alignment.models.classifier import HEAD_TENSORS

if TYPE_CHECKING:
    from peft import PeftConfig

REFERENCE = "policy_as_given"  # the frozen copy of the initial adapters


def inject(
    model: PreTrainedModel, adapters: Adapters, *, ds_config: dict[str, Any], dtype: torch.dtype, seed: int
) -> None:
    """Inject adapters as :func:`equip` does, without a reference. Adapters already in the model are kept."""
    if adapters.name not in getattr(model, "peft_config", {}):
        with _initial(ds_config, seed):
            model.add_adapter(copy.deepcopy(adapters.config), adapters.name)
        if adapters.path is not None:
            _load(model, adapters)
    else:
        train_adapter(model, adapters.name)
    _settle(model, adapters.name, dtype)


@contextlib.contextmanager
def _initial(ds_config: dict[str, Any] | None, seed: int) -> Iterator[None]:
    """Seed the initial weights separately, and set the DeepSpeed flag with which PEFT gathers weights (for DoRA)."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with loading(ds_config), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _load(model: PreTrainedModel, adapters: Adapters) -> None:
    """Load the weights of injected adapters from their folder."""
    from peft import set_peft_model_state_dict

    assert adapters.path is not None
    state = {name.removeprefix("base_model.model."): value for name, value in adapter_weights(adapters.path).items()}
    for name in HEAD_TENSORS if adapters.head else ():
        head = state.pop(name, None)
        if head is not None:
            _fill(model.get_parameter(name), head)
    set_peft_model_state_dict(model, state, adapters.name)


def _fill(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a parameter of the base model, which may be partitioned."""
    with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=is_partitioned(parameter)):
        parameter.data.copy_(value)


def _settle(model: PreTrainedModel, name: str, dtype: torch.dtype) -> None:
    """Cast the adapter called ``name``, and all other trainable parameters, to ``dtype``."""
    for parameter_name, parameter in model.named_parameters():
        if f".{name}." not in f"{parameter_name}." and not parameter.requires_grad:
            continue
        if parameter.is_floating_point() and not is_partitioned(parameter) and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def plain_start(config: PeftConfig) -> PeftConfig:
    """Return a copy with an initialization that neither reads nor changes the base weights."""
    config = copy.deepcopy(config)
    for field in ("init_lora_weights", "init_ia3_weights", "init_weights"):
        if hasattr(config, field):
            setattr(config, field, True)
    return config


def keep_given(model: PreTrainedModel, adapters: Adapters, *, ds_config: dict[str, Any], dtype: torch.dtype) -> str:
    """Add a frozen copy of the current adapters, and return its name, with which the initial policy is computed."""
    if REFERENCE not in model.peft_config:
        with _initial(ds_config, 0), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PEFT warns of a second adapter, which is intended
            model.add_adapter(plain_start(adapters.config), REFERENCE)
    train_adapter(model, adapters.name)
    for module in model.modules():
        if isinstance(module, (nn.ModuleDict, nn.ParameterDict)) and {adapters.name, REFERENCE} <= set(module.keys()):
            _copy(module[adapters.name], module[REFERENCE])
    for name, parameter in model.named_parameters():
        if f".{REFERENCE}." in f"{name}.":
            parameter.requires_grad_(False)
    _settle(model, REFERENCE, dtype)
    return REFERENCE


def _copy(source: Any, target: Any) -> None:
    """Copy a parameter, or all parameters of a module. Either may still be partitioned from an earlier run."""
    parameters = [list(one.parameters()) if isinstance(one, nn.Module) else [one] for one in (source, target)]
    for given, copied in zip(*parameters, strict=True):
        divided = [parameter for parameter in (given, copied) if is_partitioned(parameter)]
        with deepspeed.zero.GatheredParameters(divided, modifier_rank=0, enabled=bool(divided)):
            copied.data.copy_(given.data)
