"""The interface of a method: which rows it needs, which log-probs, and how it computes its loss."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias

from torch import Tensor

from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.data.batching import Batch, BatchT
from alignment.data.kinds.base import TRUNCATED, Kind
from alignment.data.packing import Packing
from alignment.data.report import DataReport
from alignment.data.windows import WindowCounts
from alignment.engines.phases import Phases
from alignment.engines.scoring import ScoringEngine, SequenceOutput
from alignment.models.tasks import CAUSAL_LM, Task
from alignment.references.base import Reference, RowIds
from alignment.references.engine import EngineReference
from alignment.reporting.metrics import MetricSums

Items: TypeAlias = Mapping[str, tuple[float, float]]  # name of a metric -> sum and count


@dataclass(frozen=True)
class Models:
    """The models of a run; ``reference`` is None for a method without one."""

    policy: ScoringEngine
    reference: Reference | None

    def close(self) -> None:
        """Release all engines."""
        try:
            self.policy.close()
        finally:
            if self.reference is not None:
                self.reference.close()


@dataclass(frozen=True)
class Window(Generic[BatchT]):
    """What a window is computed with.

    Attributes:
        batches: this rank's micro-batches.
        counts: global counts.
        models: the run's models.
        sums: accumulates the window's metrics.
        phases: records time and tokens.
        dataset: identifies the dataset of the row ids; ``""`` if the batches contain generated completions.
        together: number of micro-batches in a forward pass of a reference whose weights are gathered for each.
        rehearses: whether the batches are the largest ones of a run, of which a pass may have several.
    """

    batches: Sequence[BatchT]
    counts: WindowCounts
    models: Models
    sums: MetricSums
    phases: Phases
    dataset: str
    together: int = 1
    rehearses: bool = False

    def reference_logps(
        self, sequences: Callable[[BatchT, str], tuple[Batch, RowIds]], *, tokens: bool = False
    ) -> list[Tensor]:
        """Return the (S,) reference log-probs of each micro-batch: the phase ``reference``.

        Args:
            sequences: returns the sequences and row ids of a micro-batch; see :meth:`Method.reference_sequences`.
            tokens: return the (N,) log-probs of completion tokens instead, in the order of ``Batch.targets``.
        """
        reference = self.models.reference
        assert reference is not None
        ask = reference.token_logps if tokens else reference.sequence_logps
        gathered = reference if isinstance(reference, EngineReference) and reference.engine.partitioned else None
        asked = (sequences(each, self.dataset) for each in self.batches)
        found: list[Tensor] = []
        with self.phases("reference") as record:
            while some := list(itertools.islice(asked, 1 if gathered is None else self.together)):
                record.tokens += sum(batch.tokens for batch, _ in some)
                if gathered is None:
                    found.append(ask(*some[0]))
                else:
                    several = [batch for batch, _ in some * (self.together if self.rehearses else 1)]
                    found += gathered.logps_of_each(several[: self.together], tokens=tokens)[: len(some)]
        return found


class RowLosses(NamedTuple):
    """``local``: 0-dim with graph, this rank's sum over the window's global count; ``rows``: (R,) detached."""

    local: Tensor
    rows: Tensor


class Method(ABC, Generic[BatchT]):
    """An alignment method for one type of batch. It keeps no state between windows.

    Attributes:
        kind: the kind of rows that it needs.
        metrics: names of its metrics other than the loss.
        task: the task of the trained model.
        needs_tokens: whether :meth:`losses` also needs the log-prob of each completion token.
        untrained: batch fields that neither :meth:`scored` nor :meth:`losses` reads; they stay on the host.
        logs_sums: whether sums and counts of each class are logged in addition to means.
        trains_adapters: whether adapters are trained instead of the full model; set by the trainer.
        reduced_windows: name of the count of windows that :meth:`check_window` reports.
    """

    kind: Kind
    metrics: ClassVar[tuple[str, ...]]
    task: ClassVar[Task] = CAUSAL_LM
    needs_tokens: ClassVar[bool] = False
    untrained: ClassVar[tuple[str, ...]] = ()
    logs_sums: ClassVar[bool] = False
    reduced_windows: ClassVar[str] = "reduced_windows"
    trains_adapters: bool = False

    def __init__(self, options: AlignmentConfig) -> None:
        self.options = options
        if not isinstance(self.kind, Kind):
            raise OptionError(
                f"method {options.method}: {type(self).__name__}.kind is {self.kind!r}, not a kind of rows; set an "
                "object of a module in alignment.data.kinds, such as alignment.data.kinds.pairs.PAIRS"
            )

    @property
    def completions(self) -> tuple[str, ...]:
        """Columns of tokenized rows that contain completions."""
        return self.kind.completions

    def packing(self, trains: bool) -> Packing | None:
        """Return how rows for training or evaluation are packed; None without packing."""
        return None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss requires log-probs of a reference model."""
        return False

    @property
    def draws_partners(self) -> bool:
        """Whether each row is also paired with another row's completion."""
        return False

    @property
    def passes(self) -> int:
        """Number of passes without gradients over a window's micro-batches, for the progress bar of an evaluation."""
        return 2 if self.needs_reference else 1

    def advice(self, report: DataReport, window_rows: int) -> list[str]:
        """Return advice on settings that are valid but unlikely to work well; see ``advice``.

        Args:
            report: statistics of the training rows.
            window_rows: rows per optimizer step over all ranks.
        """
        return []

    def shown(self, rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the columns of tokenized rows that ``trainer.train_dataset`` shows; the method reads them again."""
        return {name: values for name, values in rows.items() if name not in ("row", "prompt_key", *TRUNCATED)}

    def check_window(self, counts: WindowCounts, items: Items) -> str | None:
        """Return a message if the window was computed in a reduced form, else None.

        Args:
            counts: counts of what was trained on.
            items: the window's metrics over all ranks.
        """
        return None

    def check_reduced(self, in_a_row: int, items: Items) -> str | None:
        """Return an error message if this many windows in a row, the last with these metrics, must end the run."""
        return None

    def advice_at_end(self, reduced: int, steps: int, history: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return advice for the report of a run, of whose ``steps`` windows some were ``reduced``."""
        return []

    @abstractmethod
    def scored(self, batch: BatchT) -> Batch:
        """Return the sequences for which the policy computes log-probs with gradients."""

    def reference_sequences(self, batch: BatchT, dataset: str) -> tuple[Batch, RowIds]:
        """Return the sequences of a micro-batch whose reference log-probs the loss needs, and their row ids.

        Only for methods whose rows exist before training, so that log-probs can be computed once and stored.

        Args:
            batch: the micro-batch.
            dataset: identifies the dataset of its rows.
        """
        raise NotImplementedError

    def before_training(self, window: Window[BatchT]) -> Any:
        """Run the passes without gradients over the window; the result is passed to :meth:`losses`."""
        return None

    @abstractmethod
    def losses(
        self, batch: BatchT, index: int, output: SequenceOutput, known: Any, window: Window[BatchT]
    ) -> RowLosses:
        """Compute the loss of one micro-batch, and add metrics to ``window.sums``.

        Args:
            batch: its tensors are on the policy's device, except ``untrained`` fields and attention masks
                that no model reads.
            index: index of the micro-batch in its window.
            output: scores of :meth:`scored`'s sequences, with statistics.
            known: the result of :meth:`before_training`.
            window: the window of the micro-batch.
        """


AnyMethod: TypeAlias = Method[Any]  # for any type of batch
