"""Adapters with nonzero weights for tiny models, as saved by PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

LAYERS = ["q_proj", "v_proj", "gate_proj", "down_proj"]
CAUSAL = {"task_type": "CAUSAL_LM"}


def lora(**more: Any) -> peft.LoraConfig:
    """Return a LoRA configuration for some linear layers."""
    return peft.LoraConfig(**{"r": 4, "target_modules": LAYERS, **CAUSAL, **more})


def moved(model: peft.PeftModel, size: float = 0.1) -> peft.PeftModel:
    """Add noise to every trainable parameter, so that both A *and* B are nonzero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=size)
    return model


def make_adapter(
    folder: Path, base: str | PreTrainedModel, config: peft.PeftConfig, size: float = 0.1, **kwargs: Any
) -> Path:
    """Save an adapter of a model."""
    model = AutoModelForCausalLM.from_pretrained(base, **kwargs) if isinstance(base, str) else base
    moved(peft.get_peft_model(model, config), size).save_pretrained(folder)
    return folder


@torch.no_grad()
def logps(model: Any, vocabulary: int = 77) -> Tensor:
    """Return (1, 24, V) log-probs of all tokens, in evaluation mode."""
    ids = torch.arange(24)[None] * 7 % vocabulary
    return model.eval()(input_ids=ids).logits.float().log_softmax(-1)
