"""Sample completions of policy and reference for the first prompts of a dataset, on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from alignment.engines.collectives import gathered
from alignment.engines.scoring import ScoringEngine
from alignment.internals.peft import computing_with
from alignment.references.adapter import AdapterReference
from alignment.references.base import Reference
from alignment.references.engine import EngineReference
from alignment.rollout.backend import RolloutRequest, Sampling
from alignment.rollout.engine import RolloutEngine
from alignment.rollout.texts import continuations
from alignment.run.ranks import rank, world_size
from alignment.training.context import RunContext
from alignment.training.data import PreparedData

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

    The same prompts, weights and ranks give the same texts. Random streams and engines stay as they are.

    Args:
        context: the run.
        speaker: the model that generates.
        prompts: the same on every rank; each rank processes its share.
        sampling: see :func:`fitting`.
        phase: the phase that time and tokens are recorded as.

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
