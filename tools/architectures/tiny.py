"""Tiny configurations for any causal language model: the type's defaults with small sizes.

Sizes have many names. :data:`SIZES` has a small value for each name; lists with one entry per layer are shortened so
that every kind of layer is included; :data:`OWN` has additional values for single types. Scales and soft caps of
logits are set to values that have an effect (:data:`TRANSFORMS`), because a default of 1 or None would hide a missing
transform.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tools.architectures.own import OWN

VOCABULARY = 128
LARGEST = 4_000_000  # parameters of a tiny model; more indicates a size with an unknown name
LAYERS = 4

_WIDTH, _HEADS, _PAIRS = 32, 4, 2
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "attention_hidden_size", "embedding_size",
                     "word_embed_proj_dim", "lru_width"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dff", "d_inner", "decoder_ffn_dim", "encoder_ffn_dim",
                     "ffn_hidden_size", "feed_forward_size", "dense_intermediate_size", "intermediate_size_mlp",
                     "dim_ff", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size",
                     "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
                     "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
                     "encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads",
                     "linear_num_value_heads", "linear_num_key_heads"), _HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads"), _PAIRS),
    **dict.fromkeys(("head_dim", "attention_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                     "linear_key_head_dim", "linear_value_head_dim", "swa_head_dim",
                     "index_head_dim"), _WIDTH // _HEADS),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_n_heads"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts",
                     "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions",
                     "max_source_positions", "context_length"), 64),
    **dict.fromkeys(("sliding_window", "attention_window_size", "local_attention", "window_size",
                     "attention_chunk_size"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0),
    "eos_token_id": 1,
}  # fmt: skip
TRANSFORMS: dict[str, float] = {
    "final_logit_softcapping": 2.0,
    "logits_soft_cap": 2.0,
    "output_logit_soft_cap": 2.0,
    "logit_scale": 0.3,
    "logits_scaling": 1.7,
    "lm_head_multiplier": 0.6,
    "logits_mup_width_multiplier": 1.7,
}


def tiny_config(model_type: str) -> PretrainedConfig:
    """Return the configuration of a model of this type with about 100,000 parameters."""
    return _shrunk(CONFIG_MAPPING[model_type], OWN.get(model_type, {}))


def _shrunk(cls: type[PretrainedConfig], own: dict[str, Any]) -> PretrainedConfig:
    default, values = cls(), dict[str, Any]()
    layers = getattr(default, "num_hidden_layers", None)
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            values[name] = _shrunk(type(value), own.get(name, {}))
        elif name in TRANSFORMS:
            values[name] = TRANSFORMS[name]
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            values[name] = SIZES[name]
        elif isinstance(value, (list, tuple)) and layers is not None and len(value) == layers:
            # Shortened to the number of layers, with one of every kind.
            firsts = sorted({repr(entry): place for place, entry in reversed([*enumerate(value)])}.values())[:LAYERS]
            rest = [place for place in range(len(value)) if place not in firsts]
            values[name] = [value[place] for place in sorted(firsts + rest[: LAYERS - len(firsts)])]
    given = {name: value for name, value in own.items() if not isinstance(value, dict) or name not in cls.sub_configs}
    return cls(**values | given)


def tiny_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """Create an fp32 model of this type with non-uniform predictions: no parameter keeps a constant initial value."""
    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{model_type}: {size} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
