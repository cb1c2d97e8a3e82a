"""Inject adapters into a model, and keep the initial policy computable with the weights of the policy being trained.

Adapters are injected into the transformers model itself after its scorer has replaced the head, so that PEFT's copies
of a head (``modules_to_save``) are copies of the replaced head. If new adapters have no effect yet, the initial policy
is the model with its adapters disabled; otherwise it is computed with a frozen copy of them. The adapter reference
verifies the log-probs of the whole model once the engine exists.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import nn
from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.peft import train_adapter
from alignment.internals.transformers import loading
from alignment.models.adapters.record import PREFIX, Adapters, adapter_tensors, adapter_weights, with_initialization
from alignment.models.classifier import HEAD_TENSORS

REFERENCE = "policy_as_given"  # the frozen copy of the initial adapters


class Given(NamedTuple):
    """How the initial policy is computed with the policy's weights.

    Attributes:
        adapter: name of the adapter to use; None: disable all adapters.
    """

    adapter: str | None


def equip(
    model: PreTrainedModel, adapters: Adapters, *, ds_config: dict[str, Any], dtype: torch.dtype, seed: int, keep: bool
) -> Given | None:
    """Inject adapters into a model whose head has been replaced by its scorer, and freeze everything else.

    Args:
        model: a model loaded for an engine with ``ds_config``.
        adapters: the adapters to inject.
        ds_config: configuration of the engine.
        dtype: dtype of the adapters' weights and of fully trained modules.
        seed: seed of their initial weights, which are the same on every rank and at every ZeRO stage.
        keep: whether the initial policy must remain computable.

    Returns:
        How to compute the initial policy, or None if ``keep`` is False.

    Raises:
        OptionError: weights would be trained but not saved, or weights of the base model are trained as well, so that
            the initial policy could not be restored.
    """
    neutral = adapters.begin_neutral and adapters.name not in getattr(model, "peft_config", {})
    inject(model, adapters, ds_config=ds_config, dtype=dtype, seed=seed)
    own = set(adapter_tensors(model, adapters.name, {name: name for name, _ in model.named_parameters()}).values())
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name in trained:
        if name not in own:
            raise OptionError(
                f"model: {name} requires a gradient but does not belong to the adapters, so it would be trained but "
                "not saved; freeze it, or add its module to modules_to_save"
            )
    if not keep:
        return None
    if adapters.reference is not None:
        return Given(adapters.reference)
    for name in trained:
        if f".{adapters.name}." not in f"{name}.":
            shown, bias = name.replace(".base_layer", ""), getattr(adapters.config, "bias", None)
            raise OptionError(
                f"ref_placement: adapter: {shown} of the base model is also trained (bias={bias!r}), so the policy "
                "without its adapters is not the initial policy; set ref_placement to offload, sharded or replica"
            )
    return Given(None if neutral else keep_given(model, adapters, ds_config=ds_config, dtype=dtype))


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
    settle(model, adapters.name, dtype)


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

    state = {name.removeprefix(PREFIX): value for name, value in adapter_weights(str(adapters.path)).items()}
    for name in HEAD_TENSORS if adapters.head else ():
        if name in state:
            head, value = model.get_parameter(name), state.pop(name)
            with deepspeed.zero.GatheredParameters(head, modifier_rank=0, enabled=is_partitioned(head)):
                head.data.copy_(value)
    set_peft_model_state_dict(model, state, adapters.name)


def settle(model: PreTrainedModel, name: str, dtype: torch.dtype) -> None:
    """Cast the adapter called ``name``, and all other trainable parameters, to ``dtype``."""
    for parameter_name, parameter in model.named_parameters():
        wanted = f".{name}." in f"{parameter_name}." or parameter.requires_grad
        if wanted and parameter.is_floating_point() and not is_partitioned(parameter):
            parameter.data = parameter.data.to(dtype)


def keep_given(model: PreTrainedModel, adapters: Adapters, *, ds_config: dict[str, Any], dtype: torch.dtype) -> str:
    """Add a frozen copy of the current adapters, and return its name, with which the initial policy is computed."""
    if REFERENCE not in model.peft_config:
        with _initial(ds_config, 0), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PEFT warns of a second adapter, which is intended
            model.add_adapter(with_initialization(adapters.config, True), REFERENCE)
    train_adapter(model, adapters.name)
    for module in model.modules():
        if isinstance(module, (nn.ModuleDict, nn.ParameterDict)) and {adapters.name, REFERENCE} <= set(module.keys()):
            _copy(module[adapters.name], module[REFERENCE])
    for name, parameter in model.named_parameters():
        if f".{REFERENCE}." in f"{name}.":
            parameter.requires_grad_(False)
    settle(model, REFERENCE, dtype)
    return REFERENCE


def _copy(source: Any, target: Any) -> None:
    """Copy a parameter, or all parameters of a module. Either may still be partitioned from an earlier run."""
    parameters = [list(one.parameters()) if isinstance(one, nn.Module) else [one] for one in (source, target)]
    for given, copied in zip(*parameters, strict=True):
        divided = [parameter for parameter in (given, copied) if is_partitioned(parameter)]
        with deepspeed.zero.GatheredParameters(divided, modifier_rank=0, enabled=bool(divided)):
            copied.data.copy_(given.data)
