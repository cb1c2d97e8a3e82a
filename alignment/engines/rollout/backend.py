"""What a rollout backend is, what it is asked for, and what it answers: token ids in, token ids out.

A new backend is a module beside this one with a subclass of :class:`RolloutBackend`, listed in
``alignment.engines.rollout.engine.backends``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from, and where a completion ends.

    Attributes:
        max_new_tokens: longest completion, its EOS included.
        eos_token_ids: a completion ends with the first of these; none: at ``max_new_tokens``.
        pad_token_id: fills batches; never part of a completion. May be one of ``eos_token_ids``.
        temperature: above 0; greedy completions of one prompt would all be the same.
        top_p: share of the probability that is kept; 1: all.
        top_k: number of tokens that are kept; 0: all.
        min_p: least probability that is kept, as a share of the largest one; None: all.
        repetition_penalty: divides the scores of tokens that are there already; 1: none.
        extra: further keys of transformers' ``GenerationConfig`` (``processors.check_generation_kwargs``).
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RolloutRequest:
    """This rank's share of a rollout.

    Attributes:
        prompts: token ids of this rank's prompts; there may be none.
        num_generations: completions of each prompt.
        sampling: the same on every rank.
        seed: of everything random; a function of the run's seed, the step and the rank.
        logps: return log-probs as well.
    """

    prompts: Sequence[Sequence[int]]
    num_generations: int
    sampling: Sampling
    seed: int
    logps: bool = False


@dataclass(frozen=True)
class Completion:
    """One completion, as it was generated.

    Attributes:
        ids: token ids, with the EOS if it ended by one.
        ended: whether it did.
        logps: log-prob in nats of each token under the distribution that it was drawn from: after temperature,
            penalties and cuts; None unless asked for.
    """

    ids: tuple[int, ...]
    ended: bool
    logps: tuple[float, ...] | None = None

    @classmethod
    def cut(cls, ids: Sequence[int], sampling: Sampling, logps: Sequence[float] | None = None) -> Completion:
        """A completion of what was generated, without whatever follows its first EOS."""
        end = next((place for place, token in enumerate(ids, 1) if token in sampling.eos_token_ids), None)
        return cls(tuple(ids[:end]), end is not None, None if logps is None else tuple(logps[:end]))


@dataclass(frozen=True)
class Work:
    """Some completions of one prompt; a chunk is a list of these.

    Attributes:
        prompt: the prompt's place in the request; -1 for a dummy, whose completions are thrown away.
        ids: its token ids.
        count: how many completions.
    """

    prompt: int
    ids: Sequence[int]
    count: int


def chunks(request: RolloutRequest, size: int) -> list[list[Work]]:
    """Divide a request into chunks of at most ``size`` completions, the longest prompts first.

    Prompts of a chunk are of like length, which saves padding, and a chunk that does not fit is met at once. Only a
    prompt with more completions than fit is divided.
    """
    order = sorted(range(len(request.prompts)), key=lambda prompt: -len(request.prompts[prompt]))
    parts: list[list[Work]] = []
    room = 0
    for prompt in order:
        left = request.num_generations
        while left:
            count = min(left, size)
            if count > room:
                parts.append([])
                room = size
            parts[-1].append(Work(prompt, request.prompts[prompt], count))
            room, left = room - count, left - count
    return parts


@dataclass(frozen=True)
class Generation:
    """What a backend generates a chunk with.

    Attributes:
        model: in eval mode; its weights are whole, or gathered around the forward of each layer.
        sampling: what to draw from.
        device: where the model computes.
        by_layer: weights are gathered layer by layer: keep computing until every rank has finished.
        logps: return log-probs.
        tick: called for each unit of progress.
    """

    model: PreTrainedModel
    sampling: Sampling
    device: torch.device
    by_layer: bool = False
    logps: bool = False
    tick: Callable[[], object] = lambda: None


class RolloutBackend(ABC):
    """One way to generate completions on each rank.

    Attributes:
        name: as ``rollout_backend`` says it.
        needs_whole_weights: cannot be used where ZeRO-3 gathers weights layer by layer.
        unit: what a tick of the progress bar counts.
    """

    name: ClassVar[str]
    needs_whole_weights: ClassVar[bool]
    unit: ClassVar[str]

    @abstractmethod
    def obstacle(self, model: PreTrainedModel, sampling: Sampling) -> str | None:
        """Why it cannot generate with this model and this sampling, or None."""

    @abstractmethod
    def pays(self, model: PreTrainedModel) -> bool:
        """Whether ``auto`` takes it on this device, where it can be used."""

    @abstractmethod
    def ticks(self, chunk: Sequence[Work], sampling: Sampling) -> int:
        """Units of progress of a chunk, at most."""

    def page_tokens(self, model: PreTrainedModel) -> int:
        """Tokens by which the cache of a sequence grows; 1 where it is exactly as long as the sequence."""
        return 1

    def session(self, parts: Sequence[Sequence[Work]], generation: Generation) -> AbstractContextManager[None]:
        """Within this context the chunks ``parts`` of one rollout are generated, and may share what is costly to make.

        Weights stay where they are meanwhile. Completions are those of the same calls without it.
        """
        return nullcontext()

    @abstractmethod
    def generate(self, chunk: Sequence[Work], generation: Generation) -> list[list[Completion]]:
        """The completions of each entry of a chunk, drawn from torch's global generator as it stands.

        Args:
            chunk: at least one prompt of at least one token.
            generation: what to generate it with.

        Raises:
            TrainingError: generation failed.
        """
