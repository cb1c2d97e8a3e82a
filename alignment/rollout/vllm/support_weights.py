"""Weights that a vLLM server cannot take from the policy, or would compute otherwise with. Seen with vLLM 0.32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.config.errors import setting
from alignment.models.adapters.record import Adapters, kind_of
from alignment.models.source import ModelSource

# Settings of LoRA that vLLM rejects when it loads an adapter, or that it was not compared with PEFT for.
_REJECTED = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters", "use_qalora")
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # others change the weights of the base model
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def adapter_obstacle(adapters: Adapters) -> str | None:
    """Return why vLLM does not compute with these adapters as PEFT does, and what to set instead, or None.

    Ranks and scales of single modules (``rank_pattern``, ``alpha_pattern``) and rank-stabilized LoRA are supported.
    """
    config: Any = adapters.config
    if kind_of(config) != "LORA":
        return f"vLLM has no {kind_of(config)} adapters; use LoRA"
    for name in _REJECTED:
        if getattr(config, name, None):
            return f"{setting(name, getattr(config, name))}: vLLM has no such adapters; remove it"
    if config.bias != "none":
        return f"{setting('bias', config.bias)}: vLLM loads no biases with adapters; set bias: none"
    if config.init_lora_weights not in _PLAIN_STARTS:
        what = setting("init_lora_weights", config.init_lora_weights)
        return f"{what}: it changes the base model, of which vLLM loads the original; use the default"
    outside = next((name for name in adapters.layers if not any(part.isdigit() for part in name.split("."))), None)
    if outside is not None:
        return f"vLLM loads no adapters of {outside} for most models; remove it from lora_target_modules"
    if adapters.embeddings:
        return (
            "the model has other embeddings than its checkpoint, which vLLM loads; save it and train from its folder"
        )
    return None


def base_obstacle(source: ModelSource, adapters: Adapters | None, *, allow_mismatch: bool) -> str | None:
    """Return why a server of the policy's checkpoint cannot have the policy's weights, and what to set, or None.

    ``allow_mismatch`` is ``vllm_allow_base_mismatch``: the user serves another base model on purpose.
    """
    if source.vocabulary.rows is not None:
        return "chat_template_path: vLLM cannot resize the embeddings; save the model with its new tokens first"
    if adapters is None or allow_mismatch:
        return None
    if source.quantization is not None:
        return (
            f"{source.quantization.describe()}: completions of a server with other weights are not the policy's; load "
            "the policy without quantization, or set vllm_allow_base_mismatch: true"
        )
    if source.merged:
        return (
            "other adapters were merged into the model, but vLLM loads its checkpoint; save the merged model and "
            "train from its folder, or serve it and set vllm_allow_base_mismatch: true"
        )
    return None


def server_obstacle(source: ModelSource, adapters: Adapters | None, config: Mapping[str, Any]) -> str | None:
    """Return why a server with this configuration (``ServerInfo.config``) cannot take the weights, or None."""
    if adapters is not None:
        lora: Any = adapters.config
        rank, most = max(lora.r, *lora.rank_pattern.values(), 0), (config["lora_config"] or {}).get("max_lora_rank", 0)
        return None if rank <= most else f"start it with --enable-lora --max-lora-rank {rank} or more"
    if config["device_config"]["device"] != "cpu":
        return None
    # On CPUs, vLLM computes with packed copies, of which a reload replaces only those of linear layers of their own.
    own = source.config.get_text_config()
    if own.tie_word_embeddings:
        return "on a CPU, vLLM keeps the old head of a model with tied embeddings; set use_peft: true"
    if any((getattr(own, name, None) or 0) > 1 for name in _EXPERTS):
        return "on a CPU, vLLM does not reload experts; set use_peft: true"
    return None
