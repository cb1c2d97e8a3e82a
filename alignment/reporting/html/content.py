"""The content of a report as plain values without markup; all of it is escaped when rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Record = Mapping[str, Any]


@dataclass(frozen=True)
class DataFacts:
    """One dataset of a run.

    Attributes:
        role: ``training`` or ``evaluation``, with the name of the set if there are several.
        where: its name.
        rows_in, rows_out: rows read and kept.
        dropped: number of dropped rows by reason.
        counts: further counts by name, such as truncated prompts; without zeros.
        lengths: percentiles of token counts, by what is counted.
    """

    role: str
    where: str
    rows_in: int | None
    rows_out: int | None
    dropped: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    lengths: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A prompt and what was generated for it.

    Attributes:
        prompt: its text.
        texts: completions by label, such as ``before (step 0)``.
        scores: numbers by label.
    """

    prompt: str
    texts: Mapping[str, str]
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionGroup:
    """Completions that are shown together; ``title`` names their step."""

    title: str
    rows: Sequence[Completion]
    total: int = 0


@dataclass(frozen=True)
class ChangedOption:
    """An option with its value and default as text; ``default`` is empty if unknown."""

    name: str
    value: str
    default: str = ""


@dataclass(frozen=True)
class PhaseFacts:
    """Totals of a phase; see ``PhaseRecord`` for the units."""

    name: str
    seconds: float
    tokens: float = 0
    peak_bytes: float = 0
    entries: float = 0


@dataclass(frozen=True)
class Attempt:
    """One start of the run: its number, when it started, from which step, and how many ranks it had."""

    number: str
    started: str
    begins: str
    ranks: str


@dataclass(frozen=True)
class CheckpointFacts:
    """A checkpoint on disk."""

    name: str
    step: int
    size: str
    condition: str
    best: bool = False


@dataclass(frozen=True)
class RunContent:
    """A run as its report shows it. Unknown values are empty, and omitted from the page.

    Attributes:
        name: of the run.
        folder: its output folder.
        method: the method's display name.
        state: see ``RunView.state``.
        sentence: the state in words.
        error: the error message of a failed run.
        facts: names and values for the head of the page.
        history: training and evaluation entries of the log, in order.
        marks: steps to mark in the charts, with a label each.
        train, evaluation: the final metrics, and at which step they were logged.
        data: the datasets.
        completions: what the policy generated.
        options: those changed from their defaults.
        phases: time and memory.
        phases_of: the part of the run that they cover.
        memory: what their peaks measure.
        attempts: starts of the run, if there were several.
        checkpoints: the newest first.
        warnings, advice: sentences.
        versions: of libraries, by name.
        drawn: when the report was drawn.
    """

    name: str
    folder: str
    method: str = ""
    state: str = "unknown"
    sentence: str = ""
    error: str | None = None
    facts: Sequence[tuple[str, str]] = ()
    history: Sequence[Record] = ()
    marks: Sequence[tuple[int, str]] = ()
    train: Record = field(default_factory=dict)
    train_step: int | None = None
    evaluation: Record = field(default_factory=dict)
    evaluation_step: int | None = None
    data: Sequence[DataFacts] = ()
    completions: Sequence[CompletionGroup] = ()
    options: Sequence[ChangedOption] = ()
    phases: Sequence[PhaseFacts] = ()
    phases_of: str = ""
    memory: str = "peak memory"
    attempts: Sequence[Attempt] = ()
    checkpoints: Sequence[CheckpointFacts] = ()
    warnings: Sequence[str] = ()
    advice: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    drawn: str = ""
