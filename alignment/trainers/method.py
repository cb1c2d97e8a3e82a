"""What a method is: which rows it needs, which log-probs it asks for, which objective it calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from alignment.config.options import AlignmentConfig
from alignment.data.batching import AnyBatch, Batch, Collate
from alignment.data.formats import Kind
from alignment.data.windows import WindowCounts
from alignment.engines.phases import Phases
from alignment.engines.scoring import ScoringEngine, SequenceScores
from alignment.models.architecture import CAUSAL_LM, Architecture
from alignment.reporting.metrics import MetricSums


class Reference(Protocol):
    """Anything that gives summed completion log-probs of the reference model, wherever it lives."""

    def sequence_logps(self, batch: Batch) -> Tensor:
        """(S,) fp32, no graph."""

    def close(self) -> None:
        """Release what it holds."""


@dataclass(frozen=True)
class Models:
    """The models of a run; ``reference`` is None for a method that needs none."""

    policy: ScoringEngine
    reference: Reference | None

    def close(self) -> None:
        """Release every engine."""
        try:
            self.policy.close()
        finally:
            if self.reference is not None:
                self.reference.close()


class RowLosses(NamedTuple):
    """``local``: 0-dim with graph, this rank's sum over the window's global count; ``rows``: (R,) detached."""

    local: Tensor
    rows: Tensor


class Method(ABC):
    """One alignment method. It holds no state between windows."""

    name: ClassVar[str]
    kind: ClassVar[Kind]
    completions: ClassVar[tuple[str, ...]]
    architecture: ClassVar[Architecture] = CAUSAL_LM  # what is trained
    metrics: ClassVar[tuple[str, ...]]
    logs_sums: ClassVar[bool] = False  # log sums and counts of each class beside the means
    reduced_windows: ClassVar[str] = "reduced_windows"  # what the number of windows that check_window noted is called

    def __init__(self, options: AlignmentConfig) -> None:
        self.options = options

    @property
    @abstractmethod
    def collate(self) -> Collate:
        """The function that makes this method's batches."""

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a reference model are part of the loss."""
        return False

    @property
    def draws_partners(self) -> bool:
        """Whether each row is also paired with another row's completion."""
        return False

    @property
    def passes(self) -> int:
        """How often a window's micro-batches are gone through without training, for the progress of an evaluation."""
        return 1

    def check_window(self, counts: WindowCounts) -> str | None:
        """A sentence for the user about a window that is computed in a reduced form, else None."""
        return None

    @abstractmethod
    def scored(self, batch: AnyBatch) -> Batch:
        """The sequences that the policy scores with a graph."""

    def sweep(
        self, batches: Sequence[AnyBatch], counts: WindowCounts, models: Models, sums: MetricSums, phases: Phases
    ) -> Any:
        """The pass without gradients over the whole window; what it returns is handed to :meth:`losses`."""
        return None

    @abstractmethod
    def losses(
        self, batch: AnyBatch, index: int, scores: SequenceScores, swept: Any, counts: WindowCounts, sums: MetricSums
    ) -> RowLosses:
        """Loss of one micro-batch; metrics go to ``sums``.

        Args:
            batch: on the host.
            index: number of the micro-batch in its window.
            scores: of :meth:`scored`'s sequences, with statistics.
            swept: what :meth:`sweep` returned.
            counts: global counts of the window.
            sums: this window's accumulator.
        """
