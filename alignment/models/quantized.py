"""Plan how a model is quantized, including the experts of a mixture of experts, before its weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from alignment.config.errors import OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.internals.transformers_experts import experts_modules
from alignment.models.adapters.skeleton import skeleton
from alignment.models.experts import BLOCK, expert_bytes, packed_experts, plain_experts, quantizable
from alignment.models.quantization import Quantization, plan_quantization
from alignment.models.source import ModelSource

_INSTEAD = "or set bnb_4bit_skip_experts: true to leave them unquantized"


def quantized(
    source: ModelSource,
    options: AlignmentConfig,
    *,
    key: str,
    in_4bit: bool,
    in_8bit: bool = False,
    compute: torch.dtype,
    stage: int,
) -> ModelSource:
    """Return a model with its quantization, see :func:`plan_quantization`, or unchanged if it is not quantized.

    Raises:
        OptionError: its experts cannot be quantized, or not with these options.
    """
    plan = plan_quantization(
        options,
        source.config,
        source.init_kwargs,
        key=key,
        in_4bit=in_4bit,
        in_8bit=in_8bit,
        live=source.live is not None,
        compute=compute,
        stage=stage,
    )
    return replace(source, quantization=plan and _with_experts(plan, source, options, key, compute, stage))


def _with_experts(
    plan: Quantization, source: ModelSource, options: AlignmentConfig, key: str, compute: torch.dtype, stage: int
) -> Quantization:
    """Return a plan with what is known about the experts of the model, if it has any."""
    if source.live is not None and (packed := packed_experts(source.live)):  # from an earlier run
        numels = {name: weight.quant_state.shape.numel() for name, weight in packed.items()}
    else:
        try:
            model = skeleton(source, options.trust_remote_code)
        except Exception:  # of many classes; loading the model will report it
            return plan
        plain, names = plain_experts(model), list[str]()
        if plain and not (plan.stored or plan.bits == 8 or options.bnb_4bit_skip_experts):
            names = quantizable(model, plan.config)
            _check_weights(model, plain, names, key)
        if not names:
            return replace(plan, expert_bytes=sum(weight.numel() for weight in plain.values()) * compute.itemsize)
        numels = {name: plain[name].numel() for name in names}
    _check_run(source, plan, key, compute, stage)
    nested = bool(plan.config.bnb_4bit_use_double_quant)
    size = sum(expert_bytes(numel, nested) for numel in numels.values())
    return replace(plan, packed_experts=tuple(numels), expert_bytes=size)


def _check_weights(model: nn.Module, plain: Mapping[str, Tensor], names: Sequence[str], key: str) -> None:
    """Check that the experts are recognized, and that those with these names can be quantized."""
    known = experts_modules(model)
    for name, weight in plain.items():
        module = name.rpartition(".")[0]
        if module not in known:
            raise OptionError(
                f"{key}: experts of {type(model.get_submodule(module)).__name__} ({name}) cannot be quantized; set "
                "bnb_4bit_skip_experts: true to leave all experts unquantized"
            )
        if name in names and weight[0].numel() % BLOCK:
            raise OptionError(
                f"{key}: {name} has {weight[0].numel()} elements per expert, which is not a multiple of {BLOCK}, the "
                f"size of a block; {_INSTEAD}"
            )


def _check_run(source: ModelSource, plan: Quantization, key: str, compute: torch.dtype, stage: int) -> None:
    """Check that quantized experts support the options of the run."""
    if stage == 3:
        raise OptionError(
            f"{key}: ZeRO stage 3 cannot partition quantized experts; use stage 2 (deepspeed: zero2), for a frozen "
            f"model the placement replica, {_INSTEAD}"
        )
    if plan.config.bnb_4bit_compute_dtype != compute:
        raise OptionError(
            f"{setting('bnb_4bit_compute_dtype', str(plan.config.bnb_4bit_compute_dtype)[6:])}: quantized experts "
            f"compute in {str(compute)[6:]}, as the run does; remove it, {_INSTEAD}"
        )
    if (given := source.init_kwargs.get("experts_implementation")) is not None:
        raise OptionError(
            f"model_init_kwargs: {setting('experts_implementation', given)}: quantized experts have their own; remove "
            f"it, {_INSTEAD}"
        )
