"""Tiny mixtures of experts, one of each architecture that is tested with quantized experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from support.helpers import POSITIONS, char_tokenizer, save_random

EXPERTS = 6
_SHARED = {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
_OWN: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 64},
    "qwen3_moe": {"num_experts": EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": 64, "head_dim": 16},  # transposed, with biases
    "glm4_moe_lite": {**_SHARED, **_LATENT, "num_key_value_heads": 4},
    "gemma4_text": {
        **{"enable_moe_block": True, "num_experts": EXPERTS, "top_k_experts": 2, "num_kv_shared_layers": 0},
        **{"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0},
    },
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": 64},
    "deepseek_v3": {**_SHARED, **_LATENT, "num_key_value_heads": 4},
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 128},
}  # fmt: skip
ARCHITECTURES = tuple(_OWN)


def experts_config(name: str, **more: Any) -> PretrainedConfig:
    """Return a configuration with 2 layers and a multiple of 64 elements per expert."""
    return CONFIG_MAPPING[name](
        **{
            "vocab_size": len(char_tokenizer()),
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 2,
            "max_position_embeddings": POSITIONS,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
            **_OWN[name],
            **more,
        }
    )


def make_experts(folder: Path, name: str, **more: Any) -> str:
    """Save a random model and its tokenizer. Biases, which are initialized with zeros, are random as well."""
    path = save_random(folder, AutoModelForCausalLM, experts_config(name, **more), 0, 4.0)
    model = AutoModelForCausalLM.from_pretrained(path)
    biases = [parameter for own, parameter in model.named_parameters() if own.endswith("bias")]
    for bias in biases:
        torch.nn.init.normal_(bias, std=0.3, generator=torch.Generator().manual_seed(bias.numel()))
    if biases:
        model.save_pretrained(path)
    return path
