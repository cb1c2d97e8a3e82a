"""Choice of the batch size and of weight gathering by available memory; the same for all ranks and the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from alignment.engines.collectives import device, largest_numbers
from alignment.engines.memory import free_bytes
from alignment.internals.deepspeed_zero3 import away, whole_bytes
from alignment.models.architectures import inner_width, layer_configs

_SHARE = 0.8  # of the free memory; the rest is for fragmentation and small allocations
_VOCABULARY_VECTORS = 6  # fp32: logits and their copy, scores before and after truncation, probabilities, a sort


@dataclass(frozen=True)
class Room:
    """What fits on the device with the least free memory.

    Attributes:
        gather: whether ZeRO-3 weights are gathered once for the entire rollout.
        batch_size: completions generated at the same time on each rank.
    """

    gather: bool
    batch_size: int


def measure_room(
    model: PreTrainedModel,
    context: int,
    *,
    gather: bool | None,
    batch_size: int | None,
    generations: int,
    page: int = 1,
    to_come: int = 0,
) -> Room:
    """Decide from the free memory of all ranks' devices, of which 80% may be used. Collective.

    The estimate for a completion includes the keys and values of a full context in all layers (in whole pages if the
    cache has pages), one layer's activations during the prefill, and six fp32 vectors of the vocabulary's size.
    Weights are gathered if they fit together with one chunk: ``batch_size`` completions, or all completions of one
    prompt. Without a ``batch_size``, as many completions as fit are generated at the same time, rounded down to a
    power of two so that small differences in free memory have no effect.

    Args:
        model: the policy's model.
        context: maximum length of prompt and completion together, in tokens.
        gather: requested value; None: decide by memory.
        batch_size: requested value; None: decide by memory.
        generations: completions per prompt.
        page: tokens per page of the cache; 1: no pages.
        to_come: bytes of this rank's device that are free now but will be allocated permanently.
    """
    free = free_bytes(device()) - to_come
    budget = _SHARE * -largest_numbers([-free])[0]
    weights = weight_bytes(model)
    each = completion_bytes(model.config, model.dtype.itemsize, context, page)
    if gather is None:
        gather = weights + each * (batch_size or generations) <= budget
    if batch_size is None:
        fitting = max(1, int((budget - (weights if gather else 0)) // each))
        batch_size = 1 << (fitting.bit_length() - 1)
    return Room(gather, batch_size)


def weight_bytes(module: nn.Module) -> int:
    """Memory required for gathering: the size of the partitioned weights."""
    return sum(map(whole_bytes, away(module)))


def pages(tokens: int, page: int) -> int:
    """Pages of a sequence of at most ``tokens``; one more, because sliding-window layers allocate in larger units."""
    return math.ceil(tokens / page) + 1


def completion_bytes(config: PretrainedConfig, itemsize: int, context: int, page: int = 1, prompt: int = 0) -> int:
    """Memory of one completion during generation by a model with ``itemsize`` bytes per element.

    See :func:`measure_room`. Prompts have at most ``prompt`` tokens, by default as many as a context.
    """
    config = config.get_text_config()
    layers = layer_configs(config)
    kept = pages(context, page) * page if page > 1 else context
    cache = kept * sum(map(_cached, layers))
    activations = (prompt or context) * (6 * config.hidden_size + 3 * max(map(inner_width, layers)))
    return (cache + activations) * itemsize + _VOCABULARY_VECTORS * config.vocab_size * 4


def _cached(config: PretrainedConfig) -> int:
    """Number of cached values per token and layer: its key and value in each head."""
    heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim)
