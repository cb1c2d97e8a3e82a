"""Which backend generates: what was asked for, as far as the model, the processors and the device allow it."""

from __future__ import annotations

import transformers
from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.engines.collectives import device
from alignment.engines.rollout.processors import generation_config
from alignment.engines.rollout.request import Sampling
from alignment.internals.transformers import (
    attention_implementation,
    is_flash_attention_requested,
    logits_processors,
    paged_cache_obstacle,
    supports_paged_attention,
)

# Continuous batching hands a processor the scores alone, without the tokens before them. transformers marks those that
# are content with that, but has not judged this one yet.
_SCORES_ALONE = ("MinPLogitsWarper",)


def choose_backend(asked: str, model: PreTrainedModel, sampling: Sampling) -> str:
    """``continuous`` or ``generate``, from what ``rollout_backend`` asks for.

    ``auto`` takes continuous batching where it is supported, the device is a GPU and the model computes attention by
    a flash kernel, which alone reads a paged cache in place; other kernels copy and mask the whole of it for every
    token. On a CPU (4 layers of width 256, vocabulary 32000, 8 prompts of 20 to 120 tokens twice, 64 new ones) it
    took 1.1 to 1.3 times as long as ``generate`` where every completion ran to its full length, and 0.7 times as long
    where one token in 40 ended one: ask for it where completions end early at very different lengths.

    Raises:
        OptionError: an explicit ``continuous`` that is not possible, with the reason; ``vllm``.
    """
    if asked == "vllm":
        raise OptionError(
            "rollout_backend='vllm': generating with vLLM is not supported yet; set auto, continuous or generate"
        )
    if asked == "generate":
        return asked
    obstacle = continuous_obstacle(model, sampling)
    if asked == "continuous":
        if obstacle is not None:
            raise OptionError(f"rollout_backend='continuous': {obstacle}; set rollout_backend: generate")
        return asked
    pays = device().type == "cuda" and is_flash_attention_requested(model.config)
    return "continuous" if obstacle is None and pays else "generate"


def continuous_obstacle(model: PreTrainedModel, sampling: Sampling) -> str | None:
    """Why continuous batching cannot be used, or None."""
    if not hasattr(getattr(transformers, "ContinuousBatchingConfig", None), "page_size"):
        return f"transformers {transformers.__version__} lacks the continuous batching that 5.20 has"
    for processor in logits_processors(model, generation_config(sampling)):
        name = type(processor).__name__
        if not getattr(processor, "supports_continuous_batching", False) and name not in _SCORES_ALONE:
            return f"transformers' continuous batching does not support {name}"
    architecture, config = type(model).__name__, model.config.get_text_config()
    if not supports_paged_attention(model):
        return f"transformers' continuous batching does not support {architecture}"
    # Compressed or shared keys and values have no place in its cache.
    if getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", None):
        return f"transformers' continuous batching does not support the cache of {architecture}"
    # Its eager attention is not the model's own: it knows no soft cap and no sinks.
    attention = attention_implementation(model)
    if attention != "sdpa" and not is_flash_attention_requested(model.config):
        return f"it computes attention by sdpa or a flash kernel, and {architecture} was loaded with {attention}"
    obstacle = paged_cache_obstacle(config)
    if obstacle is not None:
        return f"transformers' continuous batching does not support {architecture} ({obstacle})"
    return None
