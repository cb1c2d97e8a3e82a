"""Where a causal language model keeps its decoder, how wide its layers are, and the types that are refused and why.

What is refused here could be found out by ``models.checking`` once the weights are loaded; a reason that is known is
given before. ``docs/reference/architectures.md`` has every type of the tested transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

_LAYER_BETWEEN = (
    "a layer between its decoder and its output matrix changes the hidden states, so log-probs cannot be computed "
    "from the decoder's"
)
_DRAFTS = "it drafts tokens from another model's hidden states and reads no token ids"
_AUDIO = "it generates audio codes, several per position"
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
    "blt": "it is four models, whose sizes its configuration does not have for the whole",
    "cpmant": "its attention sees the tokens that follow",
    "reformer": "it trains on sequences of one length only, the product of its axial_pos_shape",
    "xlnet": "its attention sees the tokens that follow",
}  # fmt: skip


def refusal(config: PretrainedConfig) -> str | None:
    """Why a model with this configuration can be no causal language model here; None where nothing is known.

    A wrapper around one model, as a multi-modal one is, is judged by its own type.
    """
    if config.model_type == "bert-generation" and not config.is_decoder:
        return "its attention sees the tokens that follow; set is_decoder: true in its config.json"
    return REFUSED.get(config.model_type)


def decoder_of(model: PreTrainedModel) -> nn.Module | None:
    """The part of a model that gives hidden states; None where it has no such part.

    Llama 4's text model names a part (``base_model_prefix``) that only its multi-modal one has.
    """
    for name in (model.base_model_prefix, "model"):
        part = getattr(model, name, None) if name else None
        if isinstance(part, nn.Module):
            return part
    return None


def layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """The configuration of each layer. Gemma 4's differ, and such values cannot be read from the whole one."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * config.num_hidden_layers


def inner_width(config: PretrainedConfig) -> int:
    """The width of the widest feed-forward layer; Gemma 3n has a list with an entry per layer."""
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(max(inner) if isinstance(inner, (list, tuple)) else inner)
