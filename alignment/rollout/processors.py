"""Sampling with transformers: generation configurations, and the additional keys that they may contain."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

from alignment.config.errors import OptionError, did_you_mean, setting
from alignment.config.fields import words
from alignment.internals.transformers import logits_processors
from alignment.rollout.backend import Sampling

# Keys that shape the distribution of a token depending on the preceding tokens of its own sequence.
ACCEPTED = words(
    "min_new_tokens no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens forced_eos_token_id "
    "exponential_decay_length_penalty sequence_bias remove_invalid_values renormalize_logits typical_p epsilon_cutoff "
    "eta_cutoff top_h watermarking_config"
)
_OPTIONS = words("max_new_tokens temperature top_p top_k min_p repetition_penalty")
_INSTEAD = {
    **{name: f"it is a separate option; set {name} outside generation_kwargs" for name in _OPTIONS},
    **{f"{name}_token_id": "it is taken from the tokenizer; set it there" for name in ("bos", "eos", "pad")},
    "num_return_sequences": "set num_generations",
    "max_length": "it includes the prompt; set max_new_tokens",
    "min_length": "it includes the prompt and its padding; set min_new_tokens",
    "do_sample": "completions are always sampled; set temperature",
    "num_beams": "completions are sampled one by one; set num_generations",
    "max_time": "the run would not be reproducible; set max_new_tokens",
    "stop_strings": "completions end with the tokenizer's EOS; set max_new_tokens",
    "guidance_scale": "it runs the model twice per token; remove it",
    "use_cache": "the cache is always used; set rollout_batch_size to save memory",
    "cache_implementation": "the rollout uses its own cache; set rollout_batch_size to save memory",
}


class _NoModel(GenerationMixin):
    """A stand-in for a model that is sufficient to build logits processors."""

    config = PretrainedConfig(vocab_size=2)


def check_generation_kwargs(extra: Mapping[str, Any]) -> None:
    """Reject unusable additional sampling keys; needs no model.

    Raises:
        OptionError: a key is unknown, a separate option, or not applicable to a rollout; or its value is invalid.
    """
    known = set(vars(GenerationConfig()))
    for key, value in extra.items():
        where = f"generation_kwargs: {setting(key, value)}: "
        if key not in ACCEPTED:
            reason = "it does not affect the sampling distribution; remove it"
            if key not in known:
                close = did_you_mean(key, (*ACCEPTED, *_OPTIONS))
                reason = f"transformers has no such key{close or '; remove it'}"
            raise OptionError(where + _INSTEAD.get(key, reason))
        try:
            bare = Sampling(max_new_tokens=1, eos_token_ids=(0,), pad_token_id=0, extra={key: value})
            acts = bool(logits_processors(_NoModel(), generation_config(bare)))
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise OptionError(where + " ".join(str(error).split())) from error
        if value and not acts:
            raise OptionError(f"{where}transformers ignores this value; see its GenerationConfig, or remove it")


def generation_config(sampling: Sampling) -> GenerationConfig:
    """The generation configuration of a rollout; everything that it does not set has transformers' neutral value.

    Use it inside :func:`neutral_defaults`: values that are None here would otherwise come from the checkpoint.
    """
    return GenerationConfig(
        **{
            "max_new_tokens": sampling.max_new_tokens,
            "do_sample": True,
            "use_cache": True,
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": float(sampling.repetition_penalty),
            "eos_token_id": list(sampling.eos_token_ids) or None,
            "pad_token_id": sampling.pad_token_id,
            "disable_compile": True,
            **sampling.extra,
        }
    )


@contextlib.contextmanager
def neutral_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Ignore the checkpoint's configuration for generation within this context.

    This concerns ``generation_config.json`` and the load-balancing loss, which a mixture of experts cannot compute
    with a cache.
    """
    own, config = model.generation_config, model.config.get_text_config()
    router = getattr(config, "output_router_logits", False)
    model.generation_config = GenerationConfig()
    try:
        if router:
            config.output_router_logits = False
        yield
    finally:
        model.generation_config = own
        if router:
            config.output_router_logits = router
