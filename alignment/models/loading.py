"""Loading a causal language model, partitioned from the start under ZeRO-3, and copying a live one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import deepspeed as hf_deepspeed

from alignment.config.errors import ModelError, OptionError


@contextlib.contextmanager
def loading(ds_config: dict[str, Any] | None) -> Iterator[None]:
    """Within this context ``from_pretrained`` follows ``ds_config``, and only it.

    transformers keeps its DeepSpeed configuration in one process-wide weak reference: alive at stage 3, it partitions
    any model that is loaded and makes every ``generate`` synchronise. So it lives for one load, and whatever was there
    before comes back.
    """
    before = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed.unset_hf_deepspeed_config()
    holder = hf_deepspeed.HfDeepSpeedConfig(copy.deepcopy(ds_config)) if ds_config is not None else None
    try:
        yield
    finally:
        del holder
        hf_deepspeed._hf_deepspeed_config_weak_ref = before


def load_causal_lm(
    path: str,
    dtype: torch.dtype,
    *,
    ds_config: dict[str, Any],
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    init_kwargs: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """``AutoModelForCausalLM.from_pretrained``; under a stage-3 ``ds_config`` no rank ever holds the whole model.

    Raises:
        ModelError: the folder or its weights cannot be read.
    """
    kwargs = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code} | (init_kwargs or {})
    try:
        with loading(ds_config):
            return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **kwargs)
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        first = str(error).strip().splitlines()[0]
        raise ModelError(f"model {path!r} could not be loaded: {first}") from error


def snapshot(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of a live model as it is now; works for whole and for ZeRO-3-partitioned parameters."""
    if not any(hasattr(p, "ds_id") for p in model.parameters()):
        return copy.deepcopy(model)
    with loading(None):
        twin = type(model)(copy.deepcopy(model.config))
    names = dict(model.named_parameters())
    for name, target in twin.named_parameters():
        with deepspeed.zero.GatheredParameters(names[name]):
            target.data = names[name].detach().to(device="cpu", copy=True)
    twin.load_state_dict(dict(model.named_buffers()), strict=False)
    return twin


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout to zero: the modules, and the rates that attention layers keep as plain attributes."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


def enable_checkpointing(model: PreTrainedModel, kwargs: dict[str, Any] | None) -> None:
    """Recompute activations in the backward pass, without re-entrant autograd unless ``kwargs`` ask for it."""
    if not model.supports_gradient_checkpointing:
        raise OptionError(
            f"gradient_checkpointing: {type(model).__name__} has none; set gradient_checkpointing: false"
        )
    enable = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )  # its name until 5.22
    enable({"use_reentrant": False} | (kwargs or {}))
