"""Load a model, partitioned from the start under ZeRO-3, and copy a live one."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import deepspeed
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from alignment.config.errors import ModelError, OptionError, first_line
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.torch import is_dropout
from alignment.internals.transformers import dropout_rates, loading
from alignment.internals.transformers_experts import packing_while_loading
from alignment.models.experts import pack, quantizable
from alignment.models.kernels import hub_kernels, put_hub_kernels
from alignment.models.partitioning import decoder_layers, partitions
from alignment.models.quantization import Quantization, is_packed, prepare_quantized
from alignment.models.tasks import CAUSAL_LM, Task
from alignment.run.ranks import tell


def load_model(
    path: str,
    dtype: torch.dtype,
    *,
    ds_config: dict[str, Any],
    task: Task = CAUSAL_LM,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    init_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
    quantization: Quantization | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a model for a task with ``from_pretrained``. Under a stage-3 ``ds_config`` no rank holds the full model.

    At lower stages every rank loads it onto its GPU: the ranks of a host share the host's memory. So it does with a
    quantized model at any stage: bitsandbytes can only pack unpartitioned weights, and transformers then leaves them
    unpartitioned until the engine is created.

    Args:
        path: folder or Hub name.
        dtype: dtype of the weights.
        ds_config: configuration of the engine that will wrap the model.
        task: what to load the checkpoint as.
        attn_implementation: attention kernel; None for the default of transformers.
        trust_remote_code: run code that comes with the model.
        init_kwargs: further arguments of ``from_pretrained``.
        seed: seed of newly initialized weights, which are the same on every rank and at every ZeRO stage.
        quantization: load base weights in 4 or 8 bits.
        device: the rank's device, on which to quantize them; None to load the model into host memory.

    Raises:
        ModelError: the folder or its weights cannot be read, or weights are missing.
    """
    further, kernels = hub_kernels(init_kwargs or {})
    kwargs = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code, **further}
    if quantization is not None:
        kwargs["device_map"] = {"": device}
        if not quantization.stored:
            kwargs["quantization_config"] = quantization.config
    elif device is not None and device.type == "cuda" and not partitions(ds_config):
        kwargs["device_map"] = {"": device}
    packs = quantization is not None and bool(quantization.packed_experts)
    with packing_while_loading(quantizable, pack) if packs else contextlib.nullcontext():
        model, absent = _from_pretrained(path, task, None if quantization else ds_config, dtype=dtype, **kwargs)
    missing = [name for name in absent if not task.is_new(name)]
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ModelError(f"model {path!r}: the checkpoint has no weights for {missing[0]}{more}; {task.lacks}")
    if absent:
        _begin_anew(model, absent, seed)
        tell(f"{path}: the checkpoint has no {' and '.join(absent)}; newly initialized with seed {seed}")
    if quantization is not None:
        prepare_quantized(model, quantization)
    if kernels:
        put_hub_kernels(model)
    return model


def load_whole(
    path: str, task: Task, dtype: torch.dtype | str, trust_remote_code: bool, new: Collection[str] = (), **further: Any
) -> PreTrainedModel:
    """Load an unpartitioned model into host memory, in evaluation mode and without gradients.

    Args:
        path: folder or Hub name.
        task: what to load the checkpoint as.
        dtype: dtype of the weights; ``auto`` for that of the checkpoint.
        trust_remote_code: run code that comes with the model.
        new: names of parameters that the checkpoint may lack.
        **further: arguments of ``from_pretrained``.

    Raises:
        ModelError: the model cannot be loaded, or weights are missing.
    """
    model, absent = _from_pretrained(path, task, None, dtype=dtype, trust_remote_code=trust_remote_code, **further)
    if missing := [name for name in absent if name not in new]:
        raise ModelError(f"model {path!r}: the checkpoint has no weights for {missing[0]}; {task.lacks}")
    return model.eval().requires_grad_(False)


def _from_pretrained(
    path: str, task: Task, ds_config: dict[str, Any] | None, **arguments: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model; return it and the names of the parameters that the checkpoint lacks. See :func:`load_model`."""
    # Shapes are checked below, because the library's error does not name the weights.
    checked = {"ignore_mismatched_sizes": True, **task.arguments, **arguments}
    try:
        with loading(ds_config):
            model, report = task.auto.from_pretrained(path, output_loading_info=True, **checked)
    except torch.OutOfMemoryError:
        raise
    except (OSError, SafetensorError, ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ModelError(f"model {path!r} could not be loaded: {first_line(error)}") from error
    except (LookupError, AttributeError, ArithmeticError) as error:  # invalid values in the configuration
        raise ModelError(f"model {path!r} could not be loaded: {type(error).__name__}: {first_line(error)}") from error
    if (wrong := sorted(report["mismatched_keys"])) and "ignore_mismatched_sizes" not in arguments:
        (name, stored, expected), more = wrong[0], f" and {len(wrong) - 1} more" if wrong[1:] else ""
        instead = "use the config.json that was saved with these weights"
        if getattr(model.config, "quantization_config", None) is not None and len(expected) == 3:
            instead = "quantized experts cannot be read; use the unquantized model, and set load_in_4bit: true"
        raise ModelError(
            f"model {path!r}: {name}{more}: the checkpoint has the shape {[*stored]}, but config.json describes "
            f"{[*expected]}; {instead}"
        )
    return model, sorted(report["missing_keys"])


def _begin_anew(model: PreTrainedModel, names: Sequence[str], seed: int) -> None:
    """Initialize parameters from the model's initial distribution, identically for every rank and partitioning."""
    generator = torch.Generator().manual_seed(seed)
    deviation = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    for name in names:
        parameter = model.get_parameter(name)
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=is_partitioned(parameter)):
            parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator))


def snapshot(model: PreTrainedModel) -> PreTrainedModel:
    """Return an independent copy of a live model, whose parameters may be partitioned by ZeRO-3."""
    if not any(map(is_partitioned, model.parameters())):
        # In host memory, tensor by tensor: the device may not have enough memory for a second copy of the model.
        memo: dict[int, Any] = {}
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if is_packed(tensor):
                continue  # deepcopy copies it together with its quantization state
            twin_tensor = tensor.detach().to("cpu", copy=True)
            memo[id(tensor)] = nn.Parameter(twin_tensor) if isinstance(tensor, nn.Parameter) else twin_tensor
        return copy.deepcopy(model, memo)
    if getattr(model, "peft_config", None):
        raise ModelError(
            "model: a live model with adapters that an earlier run has partitioned (ZeRO-3) cannot be copied as the "
            "reference; set ref_placement: adapter, or reload the model"
        )
    with loading(None):
        twin = type(model)(copy.deepcopy(model.config))
    names = dict(model.named_parameters())
    for name, target in twin.named_parameters():
        with deepspeed.zero.GatheredParameters(names[name]):
            target.data = names[name].detach().to(device="cpu", copy=True)
    twin.load_state_dict(dict(model.named_buffers()), strict=False)
    return twin


def disable_dropout(model: nn.Module) -> None:
    """Set all dropout rates to 0, both in modules and in plain attributes of layers."""
    for module in model.modules():
        if is_dropout(module):
            module.p = 0.0
        for name in dropout_rates(module):
            setattr(module, name, 0.0)


def enable_checkpointing(model: PreTrainedModel, kwargs: dict[str, Any] | None) -> None:
    """Enable gradient checkpointing in all layers, non-reentrant unless ``kwargs`` say otherwise."""
    if not model.supports_gradient_checkpointing:
        raise OptionError(
            f"gradient_checkpointing: {type(model).__name__} does not support it; set gradient_checkpointing: false"
        )
    kwargs = {"use_reentrant": False} | (kwargs or {})
    if kwargs["use_reentrant"] and getattr(model.config.get_text_config(), "output_router_logits", False):
        raise OptionError(
            f"gradient_checkpointing_kwargs: {kwargs}: reentrant checkpointing drops the gradient of the "
            "load-balancing loss of a mixture-of-experts model; remove use_reentrant"
        )
    enable = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )  # its name until 5.22
    enable(kwargs)


def checkpoint_first(model: PreTrainedModel, layers: int | None) -> tuple[int, int]:
    """Let gradient checkpointing, once enabled, recompute only the first decoder layers; None: all.

    The backward pass frees the activations of the others first. A model that decides for all its layers together, as
    some remote code does, recomputes all. Returns the number of layers that are recomputed, and of all layers.
    """
    found: list[Any] = decoder_layers(model)
    if layers is None or any(not hasattr(layer, "gradient_checkpointing") for layer in found):
        layers = len(found)
    count = min(layers, len(found))
    for number, layer in enumerate(found):
        layer.gradient_checkpointing = number < count
    return count, len(found)
