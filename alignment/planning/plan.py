"""The memory plan of a run: the peak of each phase on a GPU and on a host, by part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from alignment.models.source import ModelSource
from alignment.planning.gpu_terms import RESERVE

PHASES = ("load", "rollout", "score", "reference", "train", "step", "save", "evaluate")
Parts = dict[str, float]


class NotPlanned(Exception):
    """The memory of a run cannot be planned; the message says why."""


@dataclass(frozen=True)
class MemoryPlan:
    """Peaks of the phases of a run.

    Attributes:
        gpu: bytes on each GPU by phase and part.
        host: bytes on each host by phase and part.
        tokens: tokens of the longest sequence.
        checkpointed: number of decoder layers that are recomputed in the backward pass, of all.
        layers: number of decoder layers.
        together: number of micro-batches in a forward pass of a reference whose weights are gathered for each.
    """

    gpu: dict[str, Parts]
    host: dict[str, Parts]
    tokens: int
    checkpointed: int
    layers: int
    together: int = 1

    def peak(self, phase: str | None = None, *, reserve: bool = False) -> int:
        """Return the bytes on a GPU in a phase, or in the phase that needs the most."""
        largest = max(total(parts) for name, parts in self.gpu.items() if phase in (None, name))
        return int(largest * (1 + RESERVE)) if reserve else int(largest)

    def host_peak(self) -> int:
        """Return the bytes on a host in the phase that needs the most."""
        return int(max(map(total, self.host.values())))

    def fits(self, card: float, memory: float = math.inf) -> bool:
        """Whether all phases fit in the memory of a GPU, with the reserve, and of a host."""
        return self.peak(reserve=True) <= card and self.host_peak() <= memory


def total(parts: Mapping[str, float]) -> float:
    """Return the sum of all parts."""
    return sum(parts.values())


def added(*several: Mapping[str, float]) -> Parts:
    """Return the sums of parts with the same names, without empty ones."""
    sums: Counter[str] = Counter()
    for parts in several:
        sums.update(parts)  # type: ignore[arg-type]
    return {name: size for name, size in sums.items() if size >= 1}


@dataclass(frozen=True)
class Frozen:
    """A model that only computes scores: a reference or a reward model.

    Attributes:
        name: ``reference`` or ``reward model``.
        source: the model, with its quantization.
        placement: where its weights are, see :mod:`alignment.engines.placement`.
        phase: the phase in which it computes.
        rows: sequences in a pass; None: those of a micro-batch.
        alone: whether it is released before training starts.
    """

    name: str
    source: ModelSource
    placement: str
    phase: str
    rows: int | None = None
    alone: bool = False
