"""How much fits: completions at once, and whether weights are gathered; one answer for all ranks and the whole run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from alignment.engines.collectives import device, largest_over_ranks
from alignment.engines.memory.devices import free_bytes
from alignment.internals.deepspeed_zero3 import away, whole_bytes
from alignment.models.architectures import inner_width, layer_configs

_SHARE = 0.8  # of the free memory; the rest is for fragments and the library's small things
_VOCABULARY_VECTORS = 6  # fp32 each: logits and their copy, scores before and after a cut, probabilities, a sort


@dataclass(frozen=True)
class Room:
    """What fits on the fullest device.

    Attributes:
        gather: whether ZeRO-3 weights are gathered for the rollout as a whole.
        batch_size: completions at once on each rank.
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
    scores: int = 0,
    page: int = 1,
    to_come: int = 0,
) -> Room:
    """Decide from the free memory of every rank's device, of which 80 % may be used; collective.

    A completion is counted with the keys and values of a whole context in all layers (in whole pages where the cache
    has pages), one layer's activations while its prompt is read, and six fp32 vectors of the vocabulary's size.
    Weights are gathered if they fit beside one chunk: ``batch_size`` completions, or all those of one prompt. Without
    a ``batch_size`` as many are generated at once as fit, rounded down to a power of two so that a little memory more
    or less changes nothing.

    Args:
        model: the policy's model.
        context: longest prompt and completion together, in tokens.
        gather: what was asked for; None: whatever fits.
        batch_size: what was asked for; None: whatever fits.
        generations: completions of one prompt.
        scores: fp32 vectors of the vocabulary's size that each completion keeps besides.
        page: tokens of a page of the cache; 1: it has none.
        to_come: bytes of this rank's device that are free now, and will be taken for good.
    """
    free = free_bytes(device()) - to_come
    least = -largest_over_ranks(torch.tensor([-free], dtype=torch.int64, device=device()))
    budget = _SHARE * float(least)
    weights = weight_bytes(model)
    each = completion_bytes(model, context, scores, page)
    if gather is None:
        gather = weights + each * (batch_size or generations) <= budget
    if batch_size is None:
        fitting = max(1, int((budget - (weights if gather else 0)) // each))
        batch_size = 1 << (fitting.bit_length() - 1)
    return Room(gather, batch_size)


def weight_bytes(module: nn.Module) -> int:
    """What gathering takes: the weights that are divided over ranks."""
    return sum(map(whole_bytes, away(module)))


def pages(tokens: int, page: int) -> int:
    """Pages of a sequence of at most so many tokens; one more, for layers with a sliding window take larger lots."""
    return math.ceil(tokens / page) + 1


def completion_bytes(model: PreTrainedModel, context: int, scores: int = 0, page: int = 1) -> int:
    """What one completion takes while it is generated; see :func:`measure_room`."""
    config = model.config.get_text_config()
    layers = layer_configs(config)
    kept = pages(context, page) * page if page > 1 else context
    cache = kept * sum(map(_cached, layers))
    activations = context * (6 * config.hidden_size + 3 * max(map(inner_width, layers)))
    return (cache + activations) * model.dtype.itemsize + (_VOCABULARY_VECTORS + scores) * config.vocab_size * 4


def _cached(config: PretrainedConfig) -> int:
    """The numbers that one layer keeps of a token: its key and its value in each head."""
    heads = getattr(config, "num_attention_heads", None) or 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim)
