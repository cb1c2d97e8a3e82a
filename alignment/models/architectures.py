"""Locate the decoder of a causal language model, read the width of its layers, and list the unsupported model types.

``models.checking`` would also detect the unsupported types, but only after the weights have been loaded; this module
reports known reasons earlier. ``docs/reference/architectures.md`` lists every type of the tested transformers release.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

_LAYER_BETWEEN = (
    "a layer between its decoder and its output matrix transforms the hidden states, so log-probs cannot be computed "
    "from the decoder's output"
)
_DRAFTS = "it drafts tokens from another model's hidden states and takes no token IDs"
_AUDIO = "it generates audio codes, several per position"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
            "modernbert-decoder", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta",
            "xlm-roberta-xl", "xmod",
        ),
        _LAYER_BETWEEN,
    ),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), _DRAFTS),
    **dict.fromkeys(("musicgen", "musicgen_melody"), _AUDIO),
    "blt": "it consists of four models, and its configuration has no common hidden size or vocabulary size",
    "cpmant": "its attention is not causal",
    "reformer": "it can only be trained on sequences of a fixed length, the product of its axial_pos_shape",
    "xlnet": "its attention is not causal",
}  # fmt: skip


def refusal(config: PretrainedConfig) -> str | None:
    """Return why a model with this configuration is not supported as a causal language model, or None.

    A wrapper around a language model, such as a multimodal model, is checked by the wrapper's type.
    """
    if config.model_type == "bert-generation" and not config.is_decoder:
        return "its attention is not causal; set is_decoder: true in its config.json"
    return REFUSED.get(config.model_type)


def decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """Return the submodule that computes the hidden states, or None if the model has no such submodule.

    The ``base_model_prefix`` of Llama 4's text model names a submodule that only the multimodal model has.
    """
    for name in (model.base_model_prefix, "model"):
        part = getattr(model, name, None) if name else None
        if isinstance(part, nn.Module):
            return part
    return None


def layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """Return the configuration of each layer. In Gemma 4 they differ and cannot be read from the model's."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def is_mixture(config: PretrainedConfig) -> bool:
    """Return whether a model is a mixture of experts."""
    text = config.get_text_config()
    return any((getattr(text, name, None) or 0) > 1 for name in _EXPERTS)


def inner_width(config: PretrainedConfig) -> int:
    """Return the width of the widest feed-forward layer. Gemma 3n has a list with one entry per layer."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(max(inner) if isinstance(inner, (list, tuple)) else inner)


def shorten(config: Any, layers: int) -> None:
    """Reduce a configuration to its first decoder layers."""
    config.num_hidden_layers = layers
    for name, value in list(vars(config).items()):
        if name in ("layer_types", "mlp_layer_types", "no_rope_layers") and isinstance(value, list):
            setattr(config, name, value[:layers])
