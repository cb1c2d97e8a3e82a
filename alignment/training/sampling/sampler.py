"""Answers of policy and reference to the first prompts of a dataset, by the backends of rollouts, on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from alignment.engines.collectives import gathered
from alignment.engines.launch_env import rank, world_size
from alignment.engines.rollout.backend import RolloutRequest, Sampling
from alignment.engines.rollout.engine import RolloutEngine
from alignment.engines.rollout.texts import continuations
from alignment.engines.scoring import ScoringEngine
from alignment.internals.peft import computing_with
from alignment.references.adapter import AdapterReference
from alignment.references.base import Reference
from alignment.references.engine import EngineReference
from alignment.training.context import RunContext
from alignment.training.data import PreparedData

_ANSWERS = 4  # a random stream of its own, beside those of training and of Online DPO
TokenIds = tuple[int, ...]


class Speaker(NamedTuple):
    """A model that can answer: its engine, and the context in which the engine computes as that model."""

    engine: ScoringEngine
    computing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def model(self) -> PreTrainedModel:
        return self.engine.scorer.model


def speaker_of(reference: Reference | None) -> Speaker | None:
    """The reference, if there is a model of it: not where a method needs none, or log-probs are all that is kept."""
    if isinstance(reference, AdapterReference):
        scorer, adapter = reference.policy.scorer, reference.given.adapter
        return Speaker(reference.policy, lambda: computing_with(scorer, adapter))
    return Speaker(reference.engine) if isinstance(reference, EngineReference) else None


def first_prompts(data: PreparedData, count: int | None) -> list[TokenIds]:
    """The first ``count`` different prompts of a dataset, or all.

    Rows that are learned whole have none: before them stands at most the token that begins every text.
    """
    found: dict[TokenIds, None] = {}
    for row in data.dataset.select_columns(["prompt_ids"]):
        if count is not None and len(found) == count:
            break
        if len(row["prompt_ids"]) > 1:
            found.setdefault(tuple(row["prompt_ids"]))
    return list(found)


class Sampler:
    """Samples answers; it holds no memory between two calls, and leaves random streams and engines as they were.

    Args:
        context: the run.
    """

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def answers(
        self, speaker: Speaker, prompts: Sequence[TokenIds], sampling: Sampling, phase: str = "answers"
    ) -> list[str]:
        """An answer to each prompt; the same prompts, weights and ranks give the same ones. Collective.

        Args:
            speaker: who answers.
            prompts: the same on every rank; each rank answers its share.
            sampling: how. Answers end where the model's positions do.
            phase: what time and tokens are recorded as.

        Returns:
            The texts, in the order of the prompts, on every rank.

        Raises:
            Cut: the run was asked to stop; on every rank.
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
            progress=rank() == 0 and not args.disable_tqdm,
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
        """The prompts that leave room for an answer, and the sampling cut to the room that there is."""
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(limit, int) or limit <= 0:
            return list(prompts), sampling
        kept = [prompt for prompt in prompts if len(prompt) < limit]
        room = limit - max(map(len, kept), default=0)
        return kept, replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))

    def decoded(self, prompts: Sequence[TokenIds]) -> list[str]:
        """The prompts as a model is given them, special tokens included."""
        tokenizer = self.context.processing_class
        return [tokenizer.decode(list(prompt), clean_up_tokenization_spaces=False) for prompt in prompts]


def interleaved(names: Sequence[str], columns: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Rows of a table of its columns."""
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
