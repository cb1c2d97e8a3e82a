"""Sampling settings for completions at evaluation, from the model's or a given generation configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig

from alignment.config.errors import OptionError
from alignment.rollout.backend import Sampling
from alignment.rollout.processors import ACCEPTED, check_generation_kwargs

_SHAPE = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Fields that do not affect the distribution, or are taken from the tokenizer.
_OTHERS = "max_new_tokens transformers_version bos_token_id eos_token_id pad_token_id use_cache max_length".split()


def sampling_of(config: GenerationConfig, tokenizer: Any, max_new_tokens: int, *, draw: bool = True) -> Sampling:
    """Return the sampling settings of a generation configuration, whose unset fields have neutral values.

    Args:
        config: the configuration.
        tokenizer: its EOS token also ends a completion.
        max_new_tokens: default if the configuration has none.
        draw: sample even if the configuration is greedy.

    Raises:
        OptionError: if the configuration sets what a rollout does not support, such as beams.
    """
    given = config.to_diff_dict().items()
    extra = {name: value for name, value in given if name not in (*_SHAPE, *_OTHERS)}
    try:
        check_generation_kwargs(extra)
    except OptionError as error:
        raise OptionError(str(error).replace("generation_kwargs", "generation_config", 1)) from None
    ends = token_ids(tokenizer.eos_token_id) | token_ids(config.eos_token_id)
    plain = Sampling(
        max_new_tokens=config.max_new_tokens or max_new_tokens,
        eos_token_ids=tuple(sorted(ends)),
        pad_token_id=min(ends, default=0) if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        repetition_penalty=config.repetition_penalty or 1.0,
        top_k=1,  # the most likely token
        extra=extra,
    )
    if not (draw or config.do_sample):
        return plain
    top_p = 1.0 if config.top_p is None else config.top_p
    return replace(
        plain, temperature=config.temperature or 1.0, top_p=top_p, top_k=config.top_k or 0, min_p=config.min_p
    )


def of_model(config: GenerationConfig) -> GenerationConfig:
    """Return the fields of a checkpoint's configuration that shape the distribution, without lengths and beams."""
    values = {name: getattr(config, name, None) for name in (*_SHAPE[1:], "eos_token_id", *ACCEPTED)}
    return GenerationConfig(**{name: value for name, value in values.items() if value is not None})


def token_ids(value: int | Sequence[int] | None) -> set[int]:
    """Return one id, several or none as a set."""
    return set() if value is None else {value} if isinstance(value, int) else set(value)
