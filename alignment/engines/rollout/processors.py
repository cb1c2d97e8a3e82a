"""Sampling as transformers understands it: generation configurations, and which further keys may be in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel

from alignment.config.errors import OptionError, did_you_mean, setting
from alignment.config.fields import words
from alignment.engines.rollout.backend import Sampling
from alignment.internals.transformers import logits_processors

# Keys that shape the distribution a token is drawn from, by what stands before it in its own sequence.
ACCEPTED = words(
    "min_new_tokens no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens forced_eos_token_id "
    "exponential_decay_length_penalty sequence_bias remove_invalid_values renormalize_logits typical_p epsilon_cutoff "
    "eta_cutoff top_h watermarking_config"
)
_OPTIONS = words("max_new_tokens temperature top_p top_k min_p repetition_penalty")
_INSTEAD = {
    "num_return_sequences": "set num_generations",
    "max_length": "it counts the prompt; set max_new_tokens",
    "min_length": "it counts the prompt and its padding; set min_new_tokens",
    "do_sample": "completions are always sampled; set temperature",
    "num_beams": "completions are sampled one by one; set num_generations",
    "max_time": "a run could not be repeated; set max_new_tokens",
    "stop_strings": "a completion ends with the tokenizer's EOS; set max_new_tokens",
    "guidance_scale": "it runs the model a second time for each token; leave it out",
    "use_cache": "the cache is always on; set rollout_batch_size for less memory",
    "cache_implementation": "the cache is the rollout's own; set rollout_batch_size for less memory",
    "eos_token_id": "it is the tokenizer's; set it there",
    "pad_token_id": "it is the tokenizer's; set it there",
    "bos_token_id": "it is the tokenizer's; set it there",
}


class _NoModel(GenerationMixin):
    """Enough of a model to build logits processors without one."""

    config = PretrainedConfig(vocab_size=2)


def check_generation_kwargs(extra: Mapping[str, Any]) -> None:
    """Refuse further sampling keys that cannot be used; needs no model.

    Raises:
        OptionError: a key that is unknown, an option of its own, or without a place in a rollout; or a bad value.
    """
    known = set(vars(GenerationConfig()))
    for key, value in extra.items():
        where = f"generation_kwargs: {setting(key, value)}: "
        if key in _OPTIONS:
            raise OptionError(f"{where}an option of its own; set it as {key}, outside generation_kwargs")
        if key not in ACCEPTED:
            reason = "it does not shape the distribution that tokens are drawn from; leave it out"
            if key not in known:
                close = did_you_mean(key, (*ACCEPTED, *_OPTIONS))
                reason = f"transformers has no such key{close or '; leave it out'}"
            raise OptionError(where + _INSTEAD.get(key, reason))
        try:
            bare = Sampling(max_new_tokens=1, eos_token_ids=(0,), pad_token_id=0, extra={key: value})
            acts = bool(logits_processors(_NoModel(), generation_config(bare)))
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise OptionError(where + " ".join(str(error).split())) from error
        if value and not acts:
            raise OptionError(f"{where}transformers ignores this value; see its GenerationConfig, or leave it out")


def generation_config(sampling: Sampling, logps: bool = False) -> GenerationConfig:
    """Everything about a rollout that transformers asks for; what it does not name has transformers' neutral value.

    Use it inside :func:`neutral_defaults`: whatever is None here is otherwise taken from the checkpoint.
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
            "return_dict_in_generate": logps,
            "output_scores": logps,
            **sampling.extra,
        }
    )


@contextlib.contextmanager
def neutral_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Within this context nothing of the checkpoint's configuration has a say in what the model generates.

    That is its ``generation_config.json``, and the wish for a balancing loss, which a mixture of experts cannot
    compute while it has a cache.
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
