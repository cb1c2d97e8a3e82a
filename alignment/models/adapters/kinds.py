"""Check which PEFT adapters are supported for training, and on which weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alignment.config.errors import OptionError, setting
from alignment.models.quantization import Quantization
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM

if TYPE_CHECKING:
    from peft import PeftConfig

KINDS = ("LORA", "IA3", "LOHA", "LOKR", "OFT")  # covered by tests that train, save and reload them
# LoRA settings that change the structure of a layer, or whose initialization needs data that a trainer does not have.
_LORA_REFUSED = ("layer_replication", "alora_invocation_tokens", "arrow_config", "megatron_config", "velora_config")
_BY_DATA = ("eva", "corda", "loftq", "lora_ga")
_REWRITING = ("pissa", "olora")


def check_kind(config: PeftConfig, key: str) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise OptionError(
            f"{key}: {kind} is a prompt learning method, which is not supported because it changes the length and "
            "positions of every sequence; use LORA instead"
        )
    if kind not in KINDS:
        raise OptionError(f"{key}: {kind} adapters are not supported; use one of {', '.join(KINDS)}")


def check_variant(config: Any, quantization: Quantization | None, stage: int) -> None:
    """Reject variants that are known to fail."""
    kind = str(config.peft_type.value)
    if kind == "LOHA" and stage == 3:
        raise OptionError(
            "peft_config: LOHA adapters take their shapes from the weights, which are partitioned at ZeRO stage 3; "
            "set deepspeed: zero2, or use LORA"
        )
    if kind in ("LOHA", "LOKR") and quantization is not None:
        raise OptionError(f"peft_config: {kind} adapters cannot be added to quantized weights; use LORA, IA3 or OFT")
    for name in _LORA_REFUSED:
        if getattr(config, name, None):
            raise OptionError(f"peft_config: {setting(name, getattr(config, name))} is not supported; remove it")
    start = str(getattr(config, "init_lora_weights", True)).lower()
    if start.startswith(_BY_DATA):
        raise OptionError(
            f"peft_config: init_lora_weights={start!r} needs data or a second copy of the weights; prepare the model "
            "with PEFT and pass the PeftModel, or use another initialization"
        )
    if start.startswith(_REWRITING) and (stage == 3 or quantization is not None):
        raise OptionError(
            f"peft_config: init_lora_weights={start!r} rewrites the base weights, which are "
            + (
                "partitioned at ZeRO stage 3; set deepspeed: zero2"
                if stage == 3
                else "quantized; load them unquantized"
            )
            + ", or use another initialization"
        )
    if getattr(config, "use_dora", False) and quantization is not None and stage == 3:
        raise OptionError(
            f"use_dora=True: DoRA reads the norms of the base weights, but PEFT cannot gather {quantization.bits}-bit "
            "weights at ZeRO stage 3; set deepspeed: zero2, or remove use_dora"
        )
    if getattr(config, "target_parameters", None):
        if config.lora_dropout:
            raise OptionError(
                f"lora_dropout={config.lora_dropout}: dropout is not supported with lora_target_parameters; set "
                "lora_dropout: 0"
            )
        if stage == 3:
            raise OptionError(
                "lora_target_parameters: not supported at ZeRO stage 3, where PEFT adds adapters to parameters before "
                "they are gathered; set deepspeed: zero2"
            )


def classifies(source: ModelSource) -> bool:
    return source.task.noun != CAUSAL_LM.noun
