"""Loading a model, partitioned from the start under ZeRO-3, and copying a live one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
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
from alignment.models.kernels import hub_kernels, put_hub_kernels
from alignment.models.quantization import Quantization, is_packed, prepare_quantized
from alignment.models.tasks import CAUSAL_LM, Task


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
    tell: Callable[[str], None] = lambda line: None,
) -> PreTrainedModel:
    """``from_pretrained`` for a task; under a stage-3 ``ds_config`` no rank ever holds the whole model.

    With quantised weights each rank does, on its own device: bitsandbytes can only pack whole weights, and
    transformers then leaves them undivided until the engine is made.

    Args:
        path: folder or hub name.
        dtype: of the weights.
        ds_config: of the engine that the model is for.
        task: what to load it as.
        attn_implementation: kernel of the attention; None for transformers' choice.
        trust_remote_code: run code that comes with the model.
        init_kwargs: further arguments.
        seed: of the weights that the task lets begin anew: the same on every rank, at every ZeRO stage.
        quantization: keep base weights in 4 or 8 bits.
        device: where to quantise them.
        tell: is told of weights that begin anew.

    Raises:
        ModelError: the folder or its weights cannot be read, or weights are missing.
    """
    further, kernels = hub_kernels(init_kwargs or {})
    kwargs = {
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
        **task.arguments,
        **further,
    }
    if quantization is not None:
        kwargs["device_map"] = {"": device}
        if not quantization.stored:
            kwargs["quantization_config"] = quantization.config
    try:
        with loading(ds_config if quantization is None else None):
            model, report = task.auto.from_pretrained(path, dtype=dtype, output_loading_info=True, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (OSError, SafetensorError, ValueError, TypeError, RuntimeError, ImportError) as error:
        raise ModelError(f"model {path!r} could not be loaded: {first_line(error)}") from error
    except (LookupError, AttributeError, ArithmeticError) as error:  # of a configuration that names what is not there
        raise ModelError(f"model {path!r} could not be loaded: {type(error).__name__}: {first_line(error)}") from error
    missing = sorted(name for name in report["missing_keys"] if not task.is_new(name))
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ModelError(f"model {path!r}: its weights lack {missing[0]}{more}, {task.lacks}")
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        _begin_anew(model, names, seed)
        tell(f"{path}: its weights have no {' and '.join(names)}, which begins anew, drawn with seed {seed}")
    if quantization is not None:
        prepare_quantized(model, quantization)
    loaded: PreTrainedModel = model
    if kernels:
        put_hub_kernels(loaded)
    return loaded


def _begin_anew(model: PreTrainedModel, names: Sequence[str], seed: int) -> None:
    """Draw parameters from the model's initial distribution, the same for every rank and partitioning."""
    generator = torch.Generator().manual_seed(seed)
    deviation = getattr(model.config.get_text_config(), "initializer_range", 0.02)
    for name in names:
        parameter = model.get_parameter(name)
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0, enabled=is_partitioned(parameter)):
            parameter.data.copy_(torch.empty(parameter.shape).normal_(0.0, deviation, generator=generator))


def snapshot(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a live model as it is now, sharing nothing with it; whole or ZeRO-3-partitioned parameters."""
    if not any(map(is_partitioned, model.parameters())):
        # On the host, one tensor after another: a device that just holds the model has no room for a second one.
        memo: dict[int, Any] = {}
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            if is_packed(tensor):
                continue  # copies itself with all that belongs to it, where it is
            twin_tensor = tensor.detach().to("cpu", copy=True)
            memo[id(tensor)] = nn.Parameter(twin_tensor) if isinstance(tensor, nn.Parameter) else twin_tensor
        return copy.deepcopy(model, memo)
    if getattr(model, "peft_config", None):
        raise ModelError(
            "model: a live model with adapters that an earlier run has divided (ZeRO-3) cannot be copied as the "
            "reference; set ref_placement: adapter, or load it anew"
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
    """Set every dropout to zero but those of adapters: modules, and rates that layers keep as plain attributes."""
    spared: set[nn.Module] = set()
    for module in model.modules():
        if hasattr(module, "adapter_layer_names"):  # one of PEFT's: what is not the layer it was put around
            around = {
                inner for name, child in module.named_children() if name == "base_layer" for inner in child.modules()
            }
            spared |= set(module.modules()) - around
    for module in set(model.modules()) - spared:
        if is_dropout(module):
            module.p = 0.0
        for name in dropout_rates(module):
            setattr(module, name, 0.0)


def enable_checkpointing(model: PreTrainedModel, kwargs: dict[str, Any] | None) -> None:
    """Recompute activations in the backward pass, without re-entrant autograd unless ``kwargs`` ask for it."""
    if not model.supports_gradient_checkpointing:
        raise OptionError(
            f"gradient_checkpointing: {type(model).__name__} has none; set gradient_checkpointing: false"
        )
    kwargs = {"use_reentrant": False} | (kwargs or {})
    if kwargs["use_reentrant"] and getattr(model.config.get_text_config(), "output_router_logits", False):
        raise OptionError(
            f"gradient_checkpointing_kwargs: {kwargs}: re-entrant checkpointing drops the gradient of the balancing "
            "loss of a mixture of experts; leave use_reentrant out"
        )
    enable = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )  # its name until 5.22
    enable(kwargs)
