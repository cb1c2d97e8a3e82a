"""What vLLM computes as transformers and PEFT do, and what it does not. Seen with vLLM 0.32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.config.errors import setting
from alignment.config.fields import keywords
from alignment.config.options_online import RolloutOptions
from alignment.models.adapters.record import Adapters, kind_of
from alignment.models.source import ModelSource
from alignment.rollout.backend import Sampling

_TEMPERATURES = (0.01, 2.0)  # vLLM raises lower ones, and refuses higher ones
# Settings of LoRA that vLLM rejects when it loads an adapter, or that it was not compared with PEFT for.
_REJECTED = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters", "use_qalora")
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva")  # others change the weights of the base model


def sampling_obstacle(options: RolloutOptions) -> str | None:
    """Return which settings vLLM cannot sample with as transformers does, and what to set instead, or None."""
    least, most = _TEMPERATURES
    if not least <= options.temperature <= most:
        return f"{setting('temperature', options.temperature)}: vLLM samples with {least:g} to {most:g}"
    if options.min_p and options.top_p < 1:
        both = f"{setting('min_p', options.min_p)} and {setting('top_p', options.top_p)}"
        return f"{both}: vLLM applies min_p first, and transformers top_p; set one of them"
    for name, value in keywords(options.generation_kwargs).items():
        if name != "min_new_tokens":
            return f"generation_kwargs: {setting(name, value)}: vLLM has no such setting; remove it"
    return None


def sampling_params(sampling: Sampling, count: int, seed: int) -> dict[str, Any]:
    """Return vLLM's parameters for ``count`` completions, with raw log-probs of their tokens.

    Every field that affects the distribution or the end of a completion is set, as vLLM may have other defaults.
    vLLM samples completion N with ``seed + N``.
    """
    extra: Mapping[str, Any] = sampling.extra
    return {
        "n": count,
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": float(sampling.min_p or 0.0),
        "repetition_penalty": float(sampling.repetition_penalty),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": int(extra.get("min_new_tokens") or 0),
        "ignore_eos": True,  # of the server's tokenizer
        "stop_token_ids": list(sampling.eos_token_ids),
        "logprobs": 0,
        "detokenize": False,
        "skip_special_tokens": False,
    }


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


def largest_rank(adapters: Adapters) -> int:
    """Return the largest rank of LoRA adapters."""
    config: Any = adapters.config
    return max(config.r, *config.rank_pattern.values(), 1)


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


def server_obstacle(adapters: Adapters | None, config: Mapping[str, Any]) -> str | None:
    """Return why a server with this configuration (``ServerInfo.config``) cannot load the adapters, or None."""
    if adapters is None:
        return None
    rank, most = largest_rank(adapters), (config["lora_config"] or {}).get("max_lora_rank", 0)
    return None if rank <= most else f"start it with --enable-lora --max-lora-rank {rank} or more"
