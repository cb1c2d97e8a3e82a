"""4-bit and 8-bit base weights with bitsandbytes: options, quantized checkpoints and their constraints."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from alignment.config.errors import ModelError, OptionError, setting
from alignment.config.options import AlignmentConfig
from alignment.internals.bitsandbytes import compute_as_in_training, keep_packing
from alignment.internals.transformers import quantized_names
from alignment.models.experts import IMPLEMENTATION, packed_experts

_KEY = "quantization_config"


@dataclass(frozen=True)
class Quantization:
    """Weights in 4 or 8 bits.

    Attributes:
        config: settings for transformers.
        stored: whether the checkpoint, or the live model, is already quantized; its weights are used unchanged.
        repack: storage dtype for packed weights that the checkpoint stores as bytes; None: keep bytes.
        packed_experts: names of the weights of a mixture of experts that are quantized besides linear layers.
        expert_bytes: size of the experts, including quantization constants; 0 if the model has none.
    """

    config: BitsAndBytesConfig
    stored: bool = False
    repack: torch.dtype | None = None
    packed_experts: tuple[str, ...] = ()
    expert_bytes: int = 0

    @property
    def bits(self) -> int:
        """4 or 8."""
        return 4 if self.config.load_in_4bit else 8

    def describe(self) -> str:
        """Describe how the weights are stored."""
        nested = ", nested" if self.config.bnb_4bit_use_double_quant else ""
        kind = f" ({self.config.bnb_4bit_quant_type}{nested})" if self.bits == 4 else ""
        text = f"{self.bits}-bit base weights{kind}"
        size = f"{self.expert_bytes / 1e9:.2f} GB"
        if self.packed_experts:
            return f"{text}, of which experts take {size}"
        return f"{text}, except experts ({size})" if self.expert_bytes else text

    def content(self) -> dict[str, Any]:
        """Return everything that the values of the quantized weights depend on, by name."""
        return {**self.config.to_dict(), **({"experts": True} if self.packed_experts else {})}


def plan_quantization(
    options: AlignmentConfig,
    config: PretrainedConfig,
    init_kwargs: Mapping[str, Any],
    *,
    key: str,
    in_4bit: bool,
    in_8bit: bool = False,
    live: bool = False,
    compute: torch.dtype,
    stage: int,
) -> Quantization | None:
    """Decide how a model's base weights are quantized; None if they are not.

    Args:
        options: the run's options.
        config: the model's configuration.
        init_kwargs: arguments for ``from_pretrained``, possibly with a ``quantization_config``.
        key: name of the model in messages.
        in_4bit: whether the options request 4 bits.
        in_8bit: whether the options request 8 bits.
        live: whether the model is a live object, whose weights cannot be quantized anymore.
        compute: the run's compute dtype.
        stage: ZeRO stage of the model's engine.

    Raises:
        OptionError: two settings contradict each other, or one is not supported at this ZeRO stage.
        ModelError: the checkpoint is quantized by another method.
    """
    stored = getattr(config, _KEY, None)
    if stored is not None:
        return _stored(_parsed(stored, key), key, init_kwargs, (in_4bit, in_8bit), compute, stage)
    given = init_kwargs.get(_KEY)
    if live and (in_4bit or in_8bit or given is not None):
        raise OptionError(
            f"load_in_{8 if in_8bit else 4}bit=True: {key} is a live model that is not quantized; pass its path, or "
            "load it with a quantization_config"
        )
    if given is not None:
        if in_4bit or in_8bit:
            raise OptionError(
                f"load_in_{4 if in_4bit else 8}bit=True: model_init_kwargs also has a quantization_config; remove one "
                "of the two"
            )
        explicit = isinstance(given, Mapping) and "bnb_4bit_quant_storage" in given
        parsed = _parsed(given, "model_init_kwargs")
        storage = parsed.bnb_4bit_quant_storage
        if parsed.load_in_4bit and not explicit and storage == torch.uint8:
            storage = compute  # bytes are the default of transformers
        return _checked(Quantization(_with(parsed, compute, storage, given)), compute, stage)
    if not in_4bit and not in_8bit:
        return None
    if in_8bit:
        return Quantization(BitsAndBytesConfig(load_in_8bit=True))
    named = options.bnb_4bit_quant_storage
    return _checked(
        Quantization(
            BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type=options.bnb_4bit_quant_type,
                bnb_4bit_compute_dtype=getattr(torch, options.bnb_4bit_compute_dtype or str(compute)[6:]),
                bnb_4bit_quant_storage=compute if named is None else getattr(torch, named),
                bnb_4bit_use_double_quant=options.use_bnb_nested_quant,
            )
        ),
        compute,
        stage,
    )


def _parsed(given: Any, key: str) -> BitsAndBytesConfig:
    if isinstance(given, BitsAndBytesConfig):
        _check_installed(key)
        return given
    content = dict(given) if isinstance(given, Mapping) else given.to_dict()
    method = str(content.get("quant_method", "bitsandbytes")).rpartition(".")[2].lower()
    if not method.startswith("bitsandbytes"):
        raise ModelError(
            f"{key}: its weights are quantized with {method}, which is not supported for training; use the "
            "unquantized model, in bfloat16, and set load_in_4bit: true for 4 bits"
        )
    _check_installed(key)
    content.pop("quant_method", None)
    known = {name: value for name, value in content.items() if not name.startswith("_")}
    try:
        return BitsAndBytesConfig(**known)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{key}: quantization_config={given!r} is not valid for bitsandbytes: {error}") from error


def _check_installed(key: str) -> None:
    if find_spec("bitsandbytes") is None:
        raise ModelError(
            f"{key}: its weights are quantized with bitsandbytes, which is not installed; run pip install bitsandbytes"
        )


def _with(config: BitsAndBytesConfig, compute: torch.dtype, storage: torch.dtype, given: Any) -> BitsAndBytesConfig:
    """Return a copy with the storage dtype ``storage`` and, if the compute dtype is unset, ``compute``."""
    config = copy.deepcopy(config)
    named = given.get("bnb_4bit_compute_dtype") if isinstance(given, Mapping) else None
    if named is None and config.bnb_4bit_compute_dtype == torch.float32:  # the default
        config.bnb_4bit_compute_dtype = compute
    config.bnb_4bit_quant_storage = storage
    return config


def _stored(
    config: BitsAndBytesConfig,
    key: str,
    init_kwargs: Mapping[str, Any],
    asked: tuple[bool, bool],
    compute: torch.dtype,
    stage: int,
) -> Quantization:
    has = (bool(config.load_in_4bit), bool(config.load_in_8bit))
    if any(asked) and asked != has:
        raise OptionError(
            f"load_in_{4 if asked[0] else 8}bit=True: {key} is already quantized to {4 if has[0] else 8} bits; remove "
            "the option, or use the unquantized model"
        )
    if init_kwargs.get(_KEY) is not None:
        raise OptionError(f"model_init_kwargs: {key} is already quantized; remove quantization_config")
    plan = Quantization(config, stored=True)
    storage = config.bnb_4bit_quant_storage
    if plan.bits == 8 or storage == compute:
        return plan
    if storage == torch.uint8:
        # ZeRO-3 cannot partition bytes: its flat buffers have the compute dtype.
        return Quantization(config, stored=True, repack=compute) if stage == 3 else plan
    raise ModelError(
        f"{key}: its 4-bit weights are stored as {str(storage)[6:]}, but the run computes in {str(compute)[6:]}, and "
        f"the engine's cast would corrupt them; set dtype: {str(storage)[6:]}"
    )


def _checked(plan: Quantization, compute: torch.dtype, stage: int) -> Quantization:
    """Validate a plan for weights that are quantized while they are loaded."""
    config = plan.config
    if plan.bits == 8:
        return plan
    storage = config.bnb_4bit_quant_storage
    if storage not in (compute, torch.uint8):
        raise OptionError(
            f"{setting('bnb_4bit_quant_storage', str(storage)[6:])}: the run computes in {str(compute)[6:]}, and the "
            "engine's cast would corrupt weights stored in another dtype; remove it"
        )
    if storage == torch.uint8 and stage == 3:
        raise OptionError(
            "bnb_4bit_quant_storage='uint8': ZeRO stage 3 only partitions weights of the compute dtype; remove it"
        )
    if not config.bnb_4bit_use_double_quant and stage == 3:
        raise OptionError(
            "use_bnb_nested_quant=False: ZeRO stage 3 does not partition quantization constants, which take four "
            "times the memory without nested quantization; remove it, or set deepspeed: zero2"
        )
    return plan


def prepare_quantized(model: PreTrainedModel, plan: Quantization) -> None:
    """Prepare quantized weights for training and repack them as planned. Call this before the first forward pass."""
    import bitsandbytes as bnb

    if packed_experts(model):
        model.set_experts_implementation(IMPLEMENTATION)

    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            keep_packing(module)
            if plan.repack is not None and module.weight.dtype == torch.uint8:
                module.weight.data = module.weight.data.view(-1).view(plan.repack)[:, None]
                module.weight.quant_storage = module.quant_storage = plan.repack
        elif isinstance(module, bnb.nn.Linear8bitLt) and module.weight.device.type == "cpu":
            compute_as_in_training(module)


def convertible(model: PreTrainedModel, plan: Quantization) -> list[nn.Module]:
    """Return the layers of a model on the meta device that are quantized while it is loaded."""
    named = {name: m for name, m in model.named_modules() if isinstance(m, Conv1D) or type(m) is nn.Linear}
    return [named[name] for name in quantized_names(model, named, plan.config)]


def is_packed(parameter: torch.Tensor) -> bool:
    """Return whether a parameter holds packed weights, which need the quantization state stored with them."""
    return hasattr(parameter, "quant_state") or hasattr(parameter, "SCB")
