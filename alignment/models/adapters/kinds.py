"""Which of PEFT's adapters can be trained here, on which weights; others are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alignment.config.errors import OptionError, setting
from alignment.models.quantization import Quantization
from alignment.models.source import ModelSource
from alignment.models.tasks import CAUSAL_LM

if TYPE_CHECKING:
    from peft import PeftConfig

KINDS = ("LORA", "IA3", "LOHA", "LOKR", "OFT")  # those that a test trains, saves and reads back
# LoRA's further settings that change what a layer is, or that start from data that a trainer has not got.
_LORA_REFUSED = ("layer_replication", "alora_invocation_tokens", "arrow_config", "megatron_config", "velora_config")
_BY_DATA = ("eva", "corda", "loftq", "lora_ga")
_REWRITING = ("pissa", "olora")


def check_kind(config: PeftConfig, key: str) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise OptionError(
            f"{key}: {kind} learns prompts, which change every sequence's length and positions; use LoRA instead"
        )
    if kind not in KINDS:
        raise OptionError(f"{key}: {kind} adapters have not been tried here; use one of {', '.join(KINDS)}")


def check_variant(config: Any, quantization: Quantization | None, stage: int) -> None:
    """Variants that are known to fail, by name."""
    kind = str(config.peft_type.value)
    if kind == "LOHA" and stage == 3:
        raise OptionError(
            "peft_config: LOHA adapters are made after the weights' shapes, which are divided at ZeRO stage 3; set "
            "deepspeed to zero2, or use LORA"
        )
    if kind in ("LOHA", "LOKR") and quantization is not None:
        raise OptionError(
            f"peft_config: {kind} adapters are added to the weights, which are quantised; use LORA, IA3 or OFT"
        )
    for name in _LORA_REFUSED:
        if getattr(config, name, None):
            raise OptionError(f"peft_config: {setting(name, getattr(config, name))} is not supported; leave it out")
    start = str(getattr(config, "init_lora_weights", True)).lower()
    if start.startswith(_BY_DATA):
        raise OptionError(
            f"peft_config: init_lora_weights={start!r} starts from data or from another copy of the weights; prepare "
            "the model with PEFT and pass the PeftModel, or use another start"
        )
    if start.startswith(_REWRITING) and (stage == 3 or quantization is not None):
        raise OptionError(
            f"peft_config: init_lora_weights={start!r} rewrites the base weights, which are "
            + ("divided at ZeRO stage 3; set deepspeed to zero2" if stage == 3 else "quantised; load them whole")
            + ", or use another start"
        )
    if getattr(config, "use_dora", False) and quantization is not None and stage == 3:
        raise OptionError(
            f"use_dora=True: DoRA reads the norms of the base weights, and PEFT cannot gather {quantization.bits}-bit "
            "ones at ZeRO stage 3; set deepspeed to zero2, or leave use_dora out"
        )
    if getattr(config, "target_parameters", None):
        if config.lora_dropout:
            raise OptionError(
                f"lora_dropout={config.lora_dropout}: lora_target_parameters cannot have dropout; set lora_dropout: 0"
            )
        if stage == 3:
            raise OptionError(
                "lora_target_parameters: adapters of parameters are added to them before they are gathered at ZeRO "
                "stage 3; set deepspeed to zero2"
            )


def classifies(source: ModelSource) -> bool:
    return source.task.noun != CAUSAL_LM.noun
