"""Additional values for the tiny configurations of single types."""

from __future__ import annotations

from typing import Any

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_NO_CACHE_SHARING = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
_MIXED = ["linear_attention", "hybrid"] * 2
_ZAMBA = {"attention_hidden_size": 64, "attention_head_dim": 16, "layers_block_type": _MIXED}
_GEMMA4 = {
    **_NO_CACHE_SHARING,
    "per_layer_config": {"03": {"head_dim": 16}},
    "enable_moe_block": True,
    "num_experts": 4,
}
_GEMMA4 |= {"top_k_experts": 2, "moe_intermediate_size": 16}

# By type, then by name of the configuration value; nested configurations have nested tables.
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 2},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"head_dim": 16, "per_layer_config": {number: {"head_dim": 16} for number in ("02", "03")}},
    "gemma3": {"text_config": {"final_logit_softcapping": None}},  # not used by this class
    "gemma3n_text": {**_NO_CACHE_SHARING, "intermediate_size": [64] * 4, "laurel_rank": 8},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": [2] * 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "time_step_rank": 4},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "phi4_multimodal": {
        "audio_config": {
            **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 32),
            "num_blocks": 1,
        }
    },
    "qwen4_exp_text": {
        **{"hc_lowrank": 8, "ngram_vocab_size_base": 64, "split_ngram_parts": 2},
        **{"indexer_budget": 4, "indexer_compress_ratio": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1},
        "indexer_head_dim": 8,
    },
    "xlstm": {"hidden_size": 128, "chunk_size": 16},
    "zamba": {**_ZAMBA, "mamba_dt_rank": 4},
    "zamba2": {**_ZAMBA, "n_mamba_heads": 4, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
OWN["qwen4_exp"] = {"text_config": OWN["qwen4_exp_text"]}
# Latent attention has as many key heads as query heads.
for _type in ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note", "dots3_note_text",
              "glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "minicpm3", "youtu", "bailing_hybrid",
              "kimi_linear"):  # fmt: skip
    OWN[_type] = {**OWN.get(_type, {}), "num_key_value_heads": 4}
OWN["bert-generation"] = {"is_decoder": True}  # an encoder by default
OWN["dots3_note"] = {
    "text_config": OWN["dots3_note_text"],
    "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
}
