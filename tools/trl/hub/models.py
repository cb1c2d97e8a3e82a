"""Random models with a few thousand parameters in place of the models in TRL's tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tools.trl.hub.tokenizers import FAMILIES, train

ORGANIZATION = "trl-internal-testing"
_SIZES: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"num_hidden_layers": 2, "intermediate_size": 32}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WIDE: dict[str, Any] = {"hidden_size": 16}
_REWARD: dict[str, Any] = {**_WIDE, "num_labels": 1}
_MOE_REWARD = _REWARD | _EXPERTS


@dataclass(frozen=True)
class Tiny:
    """A model: its name on the Hub, class, family of its tokenizer, published dtype, and values beside the sizes."""

    name: str
    model: str
    family: str
    dtype: torch.dtype = torch.bfloat16
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def repository(self) -> str:
        """The full name on the Hub."""
        return self.name if "/" in self.name or "-" not in self.name else f"{ORGANIZATION}/{self.name}"


_T5 = {"d_ff": 32, "d_kv": 4, "num_layers": 2, "decoder_start_token_id": 0}
MODELS = (
    Tiny("tiny-Qwen2ForCausalLM-2.5", "Qwen2ForCausalLM", "qwen"),
    Tiny("small-Qwen2ForCausalLM-2.5", "Qwen2ForCausalLM", "qwen", own={"hidden_size": 128}),
    Tiny("tiny-Qwen3ForCausalLM", "Qwen3ForCausalLM", "qwen3", own={"head_dim": 8}),
    Tiny("Qwen/Qwen3-4B", "Qwen3ForCausalLM", "qwen3", own={"head_dim": 8}),
    Tiny("tiny-Qwen3MoeForCausalLM", "Qwen3MoeForCausalLM", "qwen3", own={**_EXPERTS, "head_dim": 8}),
    Tiny("tiny-LlamaForCausalLM-3.2", "LlamaForCausalLM", "llama3"),
    Tiny("tiny-MistralForCausalLM-0.1", "MistralForCausalLM", "mistral"),
    Tiny("tiny-MistralForCausalLM-0.2", "MistralForCausalLM", "mistral"),
    Tiny("tiny-GptOssForCausalLM", "GptOssForCausalLM", "harmony", own={"num_local_experts": 4, **_EXPERTS}),
    Tiny("tiny-GPTNeoXForCausalLM", "GPTNeoXForCausalLM", "neox", torch.float16),
    Tiny("tiny-Qwen2ForSequenceClassification-2.5", "Qwen2ForSequenceClassification", "qwen", own=_REWARD),
    Tiny("tiny-LlamaForSequenceClassification-3.2", "LlamaForSequenceClassification", "llama3", own=_REWARD),
    Tiny("tiny-GPTNeoXForSequenceClassification", "GPTNeoXForSequenceClassification", "neox", own=_REWARD),
    Tiny("tiny-Qwen3ForSequenceClassification", "Qwen3ForSequenceClassification", "qwen3", own=_REWARD),
    Tiny("tiny-Qwen3MoeForSequenceClassification", "Qwen3MoeForSequenceClassification", "qwen3", own=_MOE_REWARD),
    # Loaded by tests of other models too.
    Tiny("tiny-T5ForConditionalGeneration", "T5ForConditionalGeneration", "neox", own=_T5),
    Tiny("tiny-T5ForConditionalGeneration-correct-vocab", "T5ForConditionalGeneration", "neox", own=_T5),
    # Those of TRL's example scripts.
    Tiny("trl-lib/qwen1.5-1.8b-sft", "Qwen2ForCausalLM", "qwen", own=_WIDE),
    Tiny("gpt2", "GPT2LMHeadModel", "neox", own={"n_embd": 16, "n_head": 4}),  # without a chat template, as there
    Tiny("trl-lib/pythia-1b-deduped-tldr-sft", "GPTNeoXForCausalLM", "neox", own=_WIDE),
    Tiny("trl-lib/pythia-1b-deduped-tldr-rm", "GPTNeoXForSequenceClassification", "neox", own=_REWARD),
    Tiny("Qwen/Qwen2-0.5B", "Qwen2ForCausalLM", "qwen", own=_WIDE),
    Tiny("Qwen/Qwen2-0.5B-Instruct", "Qwen2ForCausalLM", "qwen", own=_WIDE),
)


def save(tiny: Tiny, texts: list[str], folder: Path) -> None:
    """Create the model and its tokenizer, which is trained on ``texts``, and save both with ``save_pretrained``."""
    tokenizer = train(FAMILIES[tiny.family], texts)
    cls = getattr(transformers, tiny.model)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = cls.config_class(vocab_size=len(tokenizer), **{**_SIZES, **ids, **tiny.own})
    torch.manual_seed(0)
    model = cls(config).to(torch.float32)
    _draw(model)
    model.to(tiny.dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _draw(model: nn.Module) -> None:
    """Initialize the weights: random matrices, biases of 0."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
