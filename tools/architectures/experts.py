"""Experts in 4 bits: the log-probs of a tiny mixture of experts, compared with those of its dequantized weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.methods.sft_options import SFTConfig
from alignment.models.experts import packed_experts
from alignment.models.quantized import quantized
from alignment.models.source import model_source

TOLERANCE = 1e-5


def examine_experts(model: PreTrainedModel) -> str:
    """Return ``exact``, ``refused`` or ``**differs**``; an empty string for a model without experts."""
    options: AlignmentConfig = SFTConfig("out", load_in_4bit=True, use_peft=True, dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        source = model_source(folder, "model", options)
        try:
            plan = quantized(source, options, key="model", in_4bit=True, compute=torch.float32, stage=0)
        except OptionError:
            return "refused"
        if plan.quantization is None or not plan.quantization.expert_bytes:
            return ""
        found = plan.load(options, torch.float32, {}, torch.device("cpu"))
        return (
            "exact"
            if float((_logps(found) - _logps(_dequantized(folder, found))).abs().max()) < TOLERANCE
            else "**differs**"
        )


def _dequantized(folder: str, packed: PreTrainedModel) -> PreTrainedModel:
    """Return the model with the weights of ``packed``; those of experts are quantized independently, as a whole."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        Path(folder), dtype=torch.float32, experts_implementation="eager"
    )
    experts = packed_experts(packed)
    for name, weight in model.named_parameters():
        own = packed.get_parameter(name)
        if name in experts:
            weight.data = dequantize_4bit(*quantize_4bit(weight.data, compress_statistics=True, quant_type="nf4"))
        elif hasattr(own, "quant_state"):
            weight.data = dequantize_4bit(own.data, own.quant_state)
    return model


@torch.no_grad()
def _logps(model: PreTrainedModel) -> Tensor:
    """Return (2, 24, V) log-probs."""
    ids = torch.arange(48).view(2, 24) % (model.config.get_text_config().vocab_size - 2) + 2
    return model.eval()(input_ids=ids, use_cache=False).logits.log_softmax(-1)  # type: ignore[no-any-return]
