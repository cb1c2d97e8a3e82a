"""Sample completions of policy and reference for the first prompts of a dataset, on all ranks; and how to sample."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from transformers import GenerationConfig, PreTrainedModel

from alignment.config.errors import OptionError
from alignment.engines.collectives import gathered
from alignment.engines.scoring import ScoringEngine
from alignment.internals.peft import computing_with
from alignment.references.adapter import AdapterReference
from alignment.references.base import Reference
from alignment.references.engine import EngineReference
from alignment.rollout.backend import RolloutRequest, Sampling
from alignment.rollout.engine import RolloutEngine
from alignment.rollout.processors import ACCEPTED, check_generation_kwargs
from alignment.rollout.texts import continuations
from alignment.run.ranks import rank, world_size
from alignment.training.context import RunContext
from alignment.training.data import PreparedData

_SHAPE = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Fields that do not affect the distribution, or are taken from the tokenizer.
_OTHERS = "max_new_tokens transformers_version bos_token_id eos_token_id pad_token_id use_cache max_length".split()
_ANSWERS = 4  # a separate random stream from those of training and Online DPO
TokenIds = tuple[int, ...]


class Speaker(NamedTuple):
    """A model that can generate: its engine, and a context in which the engine computes as that model."""

    engine: ScoringEngine
    computing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def model(self) -> PreTrainedModel:
        return self.engine.scorer.model


def speaker_of(reference: Reference | None) -> Speaker | None:
    """Return the reference if its model is available; None without a reference, or if only log-probs are stored."""
    if isinstance(reference, AdapterReference):
        scorer, adapter = reference.policy.scorer, reference.given.adapter
        return Speaker(reference.policy, lambda: computing_with(scorer, adapter))
    return Speaker(reference.engine) if isinstance(reference, EngineReference) else None


def first_prompts(data: PreparedData, count: int | None) -> list[TokenIds]:
    """Return the first ``count`` distinct prompts of a dataset, or all.

    Rows trained on as a whole have no prompts, only the BOS token at most.
    """
    found: dict[TokenIds, None] = {}
    for row in data.dataset.select_columns(["prompt_ids"]):
        if len(found) == count:
            break
        if len(row["prompt_ids"]) > 1:
            found.setdefault(tuple(row["prompt_ids"]))
    return list(found)


def fitting(
    model: PreTrainedModel, prompts: Sequence[TokenIds], sampling: Sampling
) -> tuple[list[TokenIds], Sampling]:
    """Return the prompts that are short enough for a completion, and the sampling settings limited accordingly."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    kept = [prompt for prompt in prompts if len(prompt) < limit]
    room = limit - max(map(len, kept), default=0)
    return kept, replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))


def completions(
    context: RunContext, speaker: Speaker, prompts: Sequence[TokenIds], sampling: Sampling, phase: str
) -> list[str]:
    """Sample a completion for each prompt; return the texts in their order, on every rank. Collective.

    The same prompts, weights and ranks give the same texts. Random streams and engines stay as they are. Time and
    tokens are recorded as those of ``phase``.

    Raises:
        Cut: if the run was asked to stop; on every rank.
    """
    if not prompts:
        return []
    own = [list(prompt) for prompt in prompts[rank() :: world_size()]]
    longest = max(map(len, prompts)) + sampling.max_new_tokens
    rollout = RolloutEngine(speaker.engine, batch_size=context.args.eval_batch_size, longest_context=longest)
    seed = int(np.random.SeedSequence([context.args.seed, _ANSWERS, rank()]).generate_state(1)[0])
    with context.phases(phase) as record, speaker.computing():
        found = [group[0].ids for group in rollout.generate(RolloutRequest(own, 1, sampling, seed))]
        record.tokens += sum(map(len, own)) + sum(map(len, found))
    tokenizer = context.processing_class
    everyone = gathered([continuations(prompt, [list(ids)], tokenizer)[0] for prompt, ids in zip(own, found)])
    return [everyone[number % world_size()][number // world_size()] for number in range(len(prompts))]


def decoded(context: RunContext, prompts: Sequence[TokenIds]) -> list[str]:
    """Decode the prompts as the model sees them, special tokens included."""
    decode = context.processing_class.decode
    return [decode(list(prompt), clean_up_tokenization_spaces=False) for prompt in prompts]


def sampling_of(config: GenerationConfig, tokenizer: Any, max_new_tokens: int, *, draw: bool = True) -> Sampling:
    """Return the sampling settings of a generation configuration, with ``draw`` even if it is greedy.

    Unset fields have neutral values, but for ``max_new_tokens``. The tokenizer's EOS token also ends a completion.

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
