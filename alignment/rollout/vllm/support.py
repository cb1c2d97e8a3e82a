"""Sampling as vLLM does it: what it computes as transformers does, and what it does not. Seen with vLLM 0.32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.config.errors import setting
from alignment.config.fields import keywords
from alignment.config.options_online import RolloutOptions
from alignment.rollout.backend import Sampling

_TEMPERATURES = (0.01, 2.0)  # vLLM raises lower ones, and refuses higher ones


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
