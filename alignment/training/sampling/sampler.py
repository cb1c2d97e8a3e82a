"""Sample completions of policy and reference for the first prompts of a dataset, on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
        if count is not None and len(found) == count:
            break
        if len(row["prompt_ids"]) > 1:
            found.setdefault(tuple(row["prompt_ids"]))
    return list(found)


class Sampler:
    """Samples completions; holds no memory between calls, and leaves random streams and engines unchanged.

    Args:
        context: the run.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def answers(
        self, speaker: Speaker, prompts: Sequence[TokenIds], sampling: Sampling, phase: str = "answers"
    ) -> list[str]:
        """Sample a completion for each prompt, reproducibly for the same prompts, weights and ranks. Collective.

        Args:
            speaker: the model that generates.
            prompts: the same on every rank; each rank processes its share.
            sampling: sampling settings. Completions are also limited by the model's positions.
            phase: the phase that time and tokens are recorded as.

        Returns:
            The texts in the order of the prompts, on every rank.

        Raises:
            Cut: if the run was asked to stop; on every rank.
        """
        if not prompts:
            return []
        args, tokenizer = self.context.args, self.context.processing_class
        own = [list(prompt) for prompt in prompts[rank() :: world_size()]]
        longest = max(map(len, prompts))
        rollout = RolloutEngine(
            speaker.engine,
            batch_size=args.eval_batch_size,
            longest_context=longest + sampling.max_new_tokens,
        )
        seed = int(np.random.SeedSequence([args.seed, _ANSWERS, rank()]).generate_state(1)[0])
        with self.context.phases(phase) as record, speaker.computing():
            found = rollout.generate(RolloutRequest(own, 1, sampling, seed))
            record.tokens += sum(map(len, own)) + sum(len(each.ids) for group in found for each in group)
        texts = [
            continuations(prompt, [list(group[0].ids)], tokenizer)[0] for prompt, group in zip(own, found, strict=True)
        ]
        everyone = gathered(texts)
        return [everyone[number % world_size()][number // world_size()] for number in range(len(prompts))]

    def fitting(
        self, model: PreTrainedModel, prompts: Sequence[TokenIds], sampling: Sampling
    ) -> tuple[list[TokenIds], Sampling]:
        """Return the prompts that are short enough for a completion, and the sampling settings limited accordingly."""
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(limit, int) or limit <= 0:
            return list(prompts), sampling
        kept = [prompt for prompt in prompts if len(prompt) < limit]
        room = limit - max(map(len, kept), default=0)
        return kept, replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))

    def decoded(self, prompts: Sequence[TokenIds]) -> list[str]:
        """Decode the prompts as the model sees them, special tokens included."""
        tokenizer = self.context.processing_class
        return [tokenizer.decode(list(prompt), clean_up_tokenization_spaces=False) for prompt in prompts]


def interleaved(names: Sequence[str], columns: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Return the rows of a table from its columns."""
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
