"""The backends that generate, behind one protocol, and the choice of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from alignment.config.errors import OptionError
from alignment.engines.rollout.request import Completion, Sampling, Work


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

    @abstractmethod
    def generate(self, chunk: Sequence[Work], generation: Generation) -> list[list[Completion]]:
        """The completions of each entry of a chunk, drawn from torch's global generator as it stands.

        Args:
            chunk: at least one prompt of at least one token.
            generation: what to generate it with.

        Raises:
            TrainingError: generation failed.
        """


def backends() -> tuple[RolloutBackend, ...]:
    """Every backend, the one that ``auto`` prefers first. A new one is added here."""
    from alignment.engines.rollout.continuous import ContinuousBackend
    from alignment.engines.rollout.padded import PaddedBackend

    return ContinuousBackend(), PaddedBackend()


def choose_backend(asked: str, model: PreTrainedModel, sampling: Sampling, *, whole: bool = True) -> RolloutBackend:
    """The backend that ``rollout_backend`` asks for; ``auto``: the first one that can be used and pays.

    Args:
        asked: a name, or ``auto``.
        model: the policy's model.
        sampling: what to draw from.
        whole: whether every rank has whole weights during a rollout.

    Raises:
        OptionError: the backend that was named does not exist or cannot be used, with the reason.
    """
    known = backends()
    if asked == "auto":
        return next(one for one in known if one.pays(model) and _obstacle(one, model, sampling, whole) is None)
    named = next((one for one in known if one.name == asked), None)
    names = ", ".join(["auto", *(one.name for one in known)])
    if named is None:
        raise OptionError(f"rollout_backend={asked!r}: not supported yet; set one of {names}")
    obstacle = _obstacle(named, model, sampling, whole)
    if obstacle is not None:
        raise OptionError(f"rollout_backend={asked!r}: {obstacle}")
    return named


def _obstacle(backend: RolloutBackend, model: PreTrainedModel, sampling: Sampling, whole: bool) -> str | None:
    reason = backend.obstacle(model, sampling)
    if reason is not None:
        return f"{reason}; set rollout_backend: generate"
    if backend.needs_whole_weights and not whole:
        return (
            "needs the weights whole, and ZeRO-3 gathers them layer by layer here; set ds3_gather_for_generation: "
            "true, or rollout_backend: generate"
        )
    return None
