"""What a method is: which rows it needs, which log-probs it asks for, which objective it calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, get_args

from torch import Tensor

from alignment.config.errors import OptionError
from alignment.config.options import AlignmentConfig
from alignment.data.batching import Batch, BatchT, Collate
from alignment.data.formats import Kind
from alignment.data.packing.packs import Packing
from alignment.data.report import DataReport
from alignment.data.shown.rows import Columns, as_stored
from alignment.data.targets.rules import RowRules
from alignment.data.windows import WindowCounts
from alignment.engines.phases import Phases
from alignment.engines.scoring import ScoringEngine, SequenceOutput
from alignment.models.tasks import CAUSAL_LM, Task
from alignment.references.base import Reference, RowIds
from alignment.reporting.metrics import MetricSums


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


@dataclass(frozen=True)
class Window(Generic[BatchT]):
    """What there is to compute a window with.

    Attributes:
        batches: this rank's micro-batches.
        counts: global counts.
        models: the run's.
        sums: where metrics of the window are added up.
        phases: where time and tokens are recorded.
        dataset: names the dataset that row ids are of; ``""`` where the batches hold what was generated.
    """

    batches: Sequence[BatchT]
    counts: WindowCounts
    models: Models
    sums: MetricSums
    phases: Phases
    dataset: str

    def reference_logps(
        self, sequences: Callable[[BatchT], tuple[Batch, RowIds]], *, tokens: bool = False
    ) -> list[Tensor]:
        """(S,) log-probs of each micro-batch under the reference: the phase ``reference``.

        Args:
            sequences: a micro-batch's, and the rows that they are of.
            tokens: (N,) log-probs of the completion tokens instead, in the order of ``Batch.targets``.
        """
        reference = self.models.reference
        assert reference is not None
        ask = reference.token_logps if tokens else reference.sequence_logps
        found = []
        with self.phases("reference") as record:
            for each in self.batches:
                batch, ids = sequences(each)
                record.tokens += batch.tokens
                found.append(ask(batch, ids))
        return found


class RowLosses(NamedTuple):
    """``local``: 0-dim with graph, this rank's sum over the window's global count; ``rows``: (R,) detached."""

    local: Tensor
    rows: Tensor


class Method(ABC, Generic[BatchT]):
    """One alignment method, of the batches that it collates. It holds no state between windows.

    Attributes:
        kind: the rows that it needs.
        completions: the columns of tokenised rows that hold completions.
        metrics: the names of what it measures beside the loss.
        task: what is trained.
        needs_tokens: :meth:`losses` gets the log-prob of each completion token as well.
        untrained: fields of its batches that neither :meth:`scored` nor :meth:`losses` reads; they stay on the host.
        logs_sums: log sums and counts of each class beside the means.
        trains_adapters: adapters are trained, and not the whole model; set by the trainer.
        reduced_windows: what the number of windows that :meth:`check_window` noted is called.
    """

    kind: ClassVar[Kind]
    completions: ClassVar[tuple[str, ...]]
    metrics: ClassVar[tuple[str, ...]]
    task: ClassVar[Task] = CAUSAL_LM
    needs_tokens: ClassVar[bool] = False
    untrained: ClassVar[tuple[str, ...]] = ()
    logs_sums: ClassVar[bool] = False
    reduced_windows: ClassVar[str] = "reduced_windows"
    trains_adapters: bool = False

    def __init__(self, options: AlignmentConfig) -> None:
        if self.kind not in get_args(Kind):
            raise OptionError(
                f"method {options.method}: {type(self).__name__}.kind is {self.kind!r}, which is no type of rows; set "
                f"one of {', '.join(get_args(Kind))}"
            )
        self.options = options

    @property
    @abstractmethod
    def collate(self) -> Collate:
        """The function that makes batches of rows, on each rank."""

    @property
    def rules(self) -> RowRules:
        """Which tokens of its rows are learned."""
        return RowRules()

    def packing(self, trains: bool) -> Packing | None:
        """How rows to train on, or to evaluate on, are packed; None where each stays a row of its own."""
        return None

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
        return 2 if self.needs_reference else 1

    def advice(self, report: DataReport, window_rows: int) -> list[str]:
        """Sentences about a run that can go on as it is, each with what to set; see :mod:`.advice`.

        Args:
            report: of the rows to train on.
            window_rows: rows of one optimizer step, over all ranks.
        """
        return []

    def shown(self, rows: Columns) -> dict[str, list[Any]]:
        """Columns of tokenised rows as ``trainer.train_dataset`` shows them: by TRL's names."""
        return as_stored(rows)

    def check_window(self, counts: WindowCounts) -> str | None:
        """A sentence for the user about a window that is computed in a reduced form, else None."""
        return None

    @abstractmethod
    def scored(self, batch: BatchT) -> Batch:
        """The sequences that the policy scores with a graph."""

    def reference_sequences(self, batch: BatchT, dataset: str) -> tuple[Batch, RowIds]:
        """The sequences of a micro-batch whose log-probs under the reference the loss needs, and the rows they are of.

        Only for methods on rows that are there before training: this is what lets log-probs be computed once and kept.

        Args:
            batch: the micro-batch.
            dataset: names the dataset that its rows are of.
        """
        raise NotImplementedError

    def before_training(self, window: Window[BatchT]) -> Any:
        """The passes without gradients over the whole window; what it returns is handed to :meth:`losses`."""
        return None

    @abstractmethod
    def losses(
        self, batch: BatchT, index: int, output: SequenceOutput, known: Any, window: Window[BatchT]
    ) -> RowLosses:
        """Loss of one micro-batch; metrics go to ``window.sums``.

        Args:
            batch: its tensors are where the policy computes, but for those of :attr:`untrained` and attention masks
                that no model reads.
            index: number of the micro-batch in its window.
            scores: of :meth:`scored`'s sequences, with statistics.
            known: what :meth:`before_training` returned.
            window: that the micro-batch is of.
        """


AnyMethod: TypeAlias = Method[Any]  # of whatever batches
