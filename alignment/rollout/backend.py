"""The interfaces of rollouts, token ids in, token ids out, and of backends that generate in the training process.

To add a backend, add a module to this package with a subclass of :class:`RolloutBackend`, and list it in
``alignment.rollout.engine.backends``. Completions from elsewhere are a :class:`Rollout` of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from alignment.engines.scoring import ScoringEngine


@dataclass(frozen=True)
class Sampling:
    """The sampling distribution, and where a completion ends.

    Attributes:
        max_new_tokens: maximum length of a completion, including EOS.
        eos_token_ids: a completion ends with the first of these; if empty, at ``max_new_tokens``.
        pad_token_id: pads batches; never part of a completion. May be one of ``eos_token_ids``.
        temperature: above 0, because greedy completions of a prompt would all be the same.
        top_p: probability mass to sample from; 1: all.
        top_k: number of tokens to sample from; 0: all.
        min_p: minimum probability relative to that of the most likely token; None: no minimum.
        repetition_penalty: divides the scores of tokens that have already occurred; 1: no penalty.
        extra: additional keys of transformers' ``GenerationConfig`` (``processors.check_generation_kwargs``).
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
        prompts: token ids of this rank's prompts; may be empty.
        num_generations: completions per prompt.
        sampling: identical on every rank.
        seed: seed of all randomness; a function of the run's seed, the step and the rank.
    """

    prompts: Sequence[Sequence[int]]
    num_generations: int
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Completion:
    """One generated completion.

    Attributes:
        ids: token ids, including the EOS if there is one.
        ended: whether it ended with an EOS.
    """

    ids: tuple[int, ...]
    ended: bool

    @classmethod
    def cut(cls, ids: Sequence[int], sampling: Sampling) -> Completion:
        """Build a completion from generated tokens, dropping everything after the first EOS."""
        end = next((place for place, token in enumerate(ids, 1) if token in sampling.eos_token_ids), None)
        return cls(tuple(ids[:end]), end is not None)


class Rollout(ABC):
    """The completions of a run's policy: made once per run, before its engines.

    Attributes:
        metrics: names of the metrics of a rollout.
        measured: sum and count of each metric over this rank's part of the newest rollout.
    """

    metrics: tuple[str, ...] = ()
    measured: Mapping[str, tuple[float, float]] = {}

    def start(self) -> list[str]:
        """Prepare what needs no engine; return lines to print at the start of a run. Collective."""
        return []

    @abstractmethod
    def attach(self, policy: ScoringEngine) -> None:
        """Set the policy, whose engine has been built."""

    @abstractmethod
    def update(self, version: str) -> None:
        """Note that the policy has the weights of this version, whose name no others have. Collective."""

    @abstractmethod
    def generate(self, request: RolloutRequest) -> list[list[Completion]]:
        """Generate completions, indexed by prompt and generation. Collective, including ranks without prompts.

        Once a stop is requested, every rank raises ``Cut``.

        Raises:
            OptionError: the policy, or a setting of the request, is not supported.
            TrainingError: generation failed.
        """

    def rehearsing(self, longest: Callable[[int], RolloutRequest]) -> AbstractContextManager[None]:
        """Wrap a rehearsal; ``longest`` makes a request for the largest completions of a number of prompts."""
        return nullcontext()

    @abstractmethod
    def rehearse(self, longest: Callable[[int], RolloutRequest], most: int) -> None:
        """Generate as many completions at a time as the run will, those of ``most`` prompts at most. Collective."""

    @abstractmethod
    def describe(self) -> str:
        """What generates, for the log and the report; empty before the first rollout."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """State to save."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""

    @abstractmethod
    def close(self) -> None:
        """Release the policy, and what :meth:`start` and :meth:`attach` prepared; may be called at any time."""


@dataclass(frozen=True)
class Work:
    """A number of completions of one prompt; a chunk is a list of these.

    Attributes:
        prompt: index of the prompt in the request; -1 for a dummy, whose completions are discarded.
        ids: token ids of the prompt.
        count: number of completions.
    """

    prompt: int
    ids: Sequence[int]
    count: int


def chunks(request: RolloutRequest, size: int) -> list[list[Work]]:
    """Split a request into chunks of at most ``size`` completions, longest prompts first.

    The prompts of a chunk have similar lengths, which saves padding, and a chunk that does not fit into memory fails
    first. Only a prompt with more completions than fit into a chunk is split.
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
    """The context in which a backend generates a chunk.

    Attributes:
        model: the model in eval mode; its weights are unsharded, or gathered around the forward pass of each layer.
        sampling: the sampling distribution.
        device: device of the model.
        by_layer: weights are gathered layer by layer: keep computing until every rank has finished.
        tick: to be called whenever there is progress, so that the run is not considered hung.
    """

    model: PreTrainedModel
    sampling: Sampling
    device: torch.device
    by_layer: bool = False
    tick: Callable[[], object] = lambda: None


class RolloutBackend(ABC):
    """One way to generate completions on each rank.

    Attributes:
        name: value of ``rollout_backend``.
        needs_whole_weights: not usable if ZeRO-3 gathers weights layer by layer.
    """

    name: ClassVar[str]
    needs_whole_weights: ClassVar[bool] = False

    def obstacle(self, model: PreTrainedModel, sampling: Sampling) -> str | None:
        """Why this backend cannot generate with this model and sampling, or None."""
        return None

    def pays(self, model: PreTrainedModel) -> bool:
        """Whether ``auto`` selects this backend on this device if it is usable."""
        return True

    def page_tokens(self, model: PreTrainedModel) -> int:
        """Number of tokens by which the cache of a sequence grows; 1 if it is exactly as long as the sequence."""
        return 1

    def session(self, parts: Sequence[Sequence[Work]], generation: Generation) -> AbstractContextManager[None]:
        """Generate the chunks ``parts`` of one rollout within this context, so that they can share expensive objects.

        Weights are not moved within the context. Completions are the same as without it.
        """
        return nullcontext()

    @abstractmethod
    def generate(self, chunk: Sequence[Work], generation: Generation) -> list[list[Completion]]:
        """Generate the completions of each entry of a chunk, sampled with torch's global generator.

        Args:
            chunk: at least one prompt of at least one token.
            generation: the context to generate in.

        Raises:
            TrainingError: generation failed.
        """


def continuations(prompt: list[int], completions: Sequence[list[int]], tokenizer: Any) -> list[str]:
    """The text that each completion adds to the prompt's, without special tokens."""

    def decoded(sequences: Sequence[list[int]]) -> list[str]:
        # No clean-up: rewards see the text exactly as generated.
        texts = tokenizer.batch_decode(sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return list(texts)

    head, *wholes = decoded([prompt, *([*prompt, *ids] for ids in completions)])
    if all(whole.startswith(head) for whole in wholes):
        return [whole[len(head) :] for whole in wholes]
    return decoded(completions)  # a character is split between prompt and completion
