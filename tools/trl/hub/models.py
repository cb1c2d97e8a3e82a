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
_SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_REWARD = {**_SIZES, "hidden_size": 16, "num_labels": 1}


@dataclass(frozen=True)
class Tiny:
    """A model: its name on the Hub, its class and sizes, and the family of its tokenizer.

    Attributes:
        dtype: dtype of the saved weights, as published.
        own: configuration values that extend or override the default sizes.
        sizes: whether the default sizes are used.
    """

    name: str
    model: str
    family: str
    dtype: torch.dtype = torch.bfloat16
    own: dict[str, Any] = field(default_factory=dict)
    sizes: bool = True

    @property
    def repository(self) -> str:
        """The full name on the Hub."""
        return self.name if "/" in self.name else f"{ORGANIZATION}/{self.name}"


_T5 = {"d_model": 24, "d_ff": 32, "d_kv": 4, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}
_GLM = {"moe_intermediate_size": 32, "head_dim": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK = {"num_attention_heads": 2, "first_k_dense_replace": 1, "n_routed_experts": 8, "moe_intermediate_size": 16}
_DEEPSEEK |= _MLA | {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
_NEMOTRON = {"layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 4}
_NEMOTRON |= {"mamba_n_groups": 1, "ssm_state_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
_NEMOTRON |= {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32}
_LFM2 = {"full_attn_idxs": [1], "block_multiple_of": 8}
MODELS = (
    Tiny("tiny-Qwen2ForCausalLM-2.5", "Qwen2ForCausalLM", "qwen"),
    Tiny("small-Qwen2ForCausalLM-2.5", "Qwen2ForCausalLM", "qwen", own={"hidden_size": 128}),
    Tiny("tiny-Qwen3ForCausalLM", "Qwen3ForCausalLM", "qwen3", own={"head_dim": 8}),
    Tiny("Qwen/Qwen3-4B", "Qwen3ForCausalLM", "qwen3", own={"head_dim": 8}),
    Tiny("tiny-Qwen3MoeForCausalLM", "Qwen3MoeForCausalLM", "qwen3", own={**_EXPERTS, "head_dim": 8}),
    Tiny("tiny-LlamaForCausalLM-3", "LlamaForCausalLM", "llama3"),
    Tiny("tiny-LlamaForCausalLM-3.1", "LlamaForCausalLM", "llama3"),
    Tiny("tiny-LlamaForCausalLM-3.2", "LlamaForCausalLM", "llama3"),
    Tiny("hf-internal-testing/tiny-random-LlamaForCausalLM", "LlamaForCausalLM", "llama", torch.float32),
    Tiny("tiny-MistralForCausalLM-0.1", "MistralForCausalLM", "mistral"),
    Tiny("tiny-MistralForCausalLM-0.2", "MistralForCausalLM", "mistral"),
    Tiny("tiny-GptOssForCausalLM", "GptOssForCausalLM", "harmony", own={"num_local_experts": 4, **_EXPERTS}),
    Tiny("tiny-GPTNeoXForCausalLM", "GPTNeoXForCausalLM", "neox", torch.float16),
    Tiny("EleutherAI/pythia-14m", "GPTNeoXForCausalLM", "neox", torch.float16),
    Tiny("dummy-GPT2-correct-vocab", "GPT2LMHeadModel", "gpt2", torch.float32, own={"n_embd": 8, "n_head": 4}),
    Tiny("tiny-CohereForCausalLM", "CohereForCausalLM", "cohere", torch.float16, own={"logit_scale": 0.125}),
    Tiny("tiny-Cohere2ForCausalLM", "Cohere2ForCausalLM", "cohere", own={"logit_scale": 1.0}),
    Tiny("tiny-GemmaForCausalLM", "GemmaForCausalLM", "gemma", own={"head_dim": 8}),
    Tiny("tiny-Gemma2ForCausalLM", "Gemma2ForCausalLM", "gemma", own={"head_dim": 8}),
    Tiny("tiny-Phi3ForCausalLM", "Phi3ForCausalLM", "phi3"),
    Tiny("tiny-Olmo3ForCausalLM", "Olmo3ForCausalLM", "olmo3"),
    Tiny("tiny-DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM", "deepseek", own=_DEEPSEEK),
    Tiny("tiny-DeepseekV3ForCausalLM-0528", "DeepseekV3ForCausalLM", "deepseek", own=_DEEPSEEK),
    Tiny("tiny-Glm4MoeForCausalLM", "Glm4MoeForCausalLM", "glm4", own=_GLM),
    Tiny("tiny-Lfm2ForCausalLM", "Lfm2ForCausalLM", "lfm2", own=_LFM2),
    Tiny("tiny-Lfm2ForCausalLM-2.5", "Lfm2ForCausalLM", "lfm2", own=_LFM2),
    Tiny("tiny-NemotronHForCausalLM-nano", "NemotronHForCausalLM", "olmo3", own={"hidden_size": 16, **_NEMOTRON}),
    Tiny("tiny-Qwen2ForSequenceClassification-2.5", "Qwen2ForSequenceClassification", "qwen", own=_REWARD),
    Tiny("tiny-LlamaForSequenceClassification-3.2", "LlamaForSequenceClassification", "llama3", own=_REWARD),
    Tiny("tiny-GPTNeoXForSequenceClassification", "GPTNeoXForSequenceClassification", "neox", own=_REWARD),
    Tiny("tiny-Qwen3ForSequenceClassification", "Qwen3ForSequenceClassification", "qwen3", own=_REWARD),
    Tiny(
        "tiny-Qwen3MoeForSequenceClassification",
        "Qwen3MoeForSequenceClassification",
        "qwen3",
        own={**_REWARD, **_EXPERTS, "head_dim": 8},
    ),
    Tiny("tiny-T5ForConditionalGeneration", "T5ForConditionalGeneration", "t5", torch.float32, _T5, sizes=False),
    Tiny(
        "tiny-T5ForConditionalGeneration-correct-vocab",
        "T5ForConditionalGeneration",
        "t5",
        torch.float32,
        _T5,
        sizes=False,
    ),
)


def save(tiny: Tiny, texts: list[str], folder: Path) -> None:
    """Create the model and its tokenizer, and save both in the layout of transformers.

    Args:
        tiny: the model.
        texts: texts on which its tokenizer is trained.
        folder: target folder; created if it does not exist.
    """
    tokenizer = train(FAMILIES[tiny.family], texts)
    cls = getattr(transformers, tiny.model)
    pad = tokenizer.pad_token_id
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": pad}
    config = cls.config_class(vocab_size=len(tokenizer), **{**(_SIZES if tiny.sizes else {}), **ids, **tiny.own})
    torch.manual_seed(0)
    model = cls(config).to(torch.float32)
    _draw(model)
    model.to(tiny.dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _draw(model: nn.Module) -> None:
    """Initialize the weights: random matrices, norms of 1, biases of 0."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters():
        left = parameter.ndim > 1 and "bias" not in name and not parameter.any()
        if left or not torch.isfinite(parameter).all():
            raise ValueError(f"{type(model).__name__}: {name} was not initialized")
