"""The report at the end of a run, as Markdown that is also readable in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from alignment.reporting.log_reading import is_mean

Row = Sequence[str]


@dataclass(frozen=True)
class RunReport:
    """The content of a report, in plain values.

    Attributes:
        title: the report's title.
        facts: names and values, such as ``("steps", "150")``.
        phases: totals by name: seconds, tokens, peak_bytes, entries.
        memory: column header of the peaks, such as ``GPU memory``.
        train: the last logged training metrics.
        evaluation: metrics of the last evaluation, without their ``eval_`` prefix.
        advice: sentences of advice.
    """

    title: str
    facts: Sequence[tuple[str, str]]
    phases: Mapping[str, Mapping[str, float]]
    memory: str
    train: Mapping[str, float]
    evaluation: Mapping[str, float]
    advice: Sequence[str] = ()

    def text(self) -> str:
        """The report as Markdown."""
        facts = "\n".join(f"- {name}: {value}" for name, value in self.facts)
        parts = [f"# {self.title}", facts, "## Phases", self._phases()]
        if self.train or self.evaluation:
            parts += ["## Final metrics", self._metrics()]
        parts += ["## Advice", "\n".join(f"- {text}" for text in self.advice)] if self.advice else []
        return "\n\n".join(parts) + "\n"

    def _phases(self) -> str:
        total = sum(phase["seconds"] for phase in self.phases.values()) or 1.0
        rows = [
            (
                name,
                f"{int(phase['entries'])}",
                f"{phase['seconds']:.2f}",
                f"{100 * phase['seconds'] / total:.0f}%",
                f"{phase['tokens'] / phase['seconds']:,.0f}" if phase["tokens"] and phase["seconds"] else "",
                gibibytes(phase["peak_bytes"]),
            )
            for name, phase in self.phases.items()
        ]
        return markdown_table(("phase", "times", "seconds", "share", "tokens/s", self.memory), rows)

    def _metrics(self) -> str:
        names = dict.fromkeys(name for name in (*self.train, *self.evaluation) if is_mean(name))
        both = [(self.train, "training"), (self.evaluation, "evaluation")]
        there = [(values, title) for values, title in both if values]
        rows = [(name, *(_number(values.get(name)) for values, _ in there)) for name in names]
        return markdown_table(("metric", *(title for _, title in there)), rows)


def gibibytes(count: float) -> str:
    """Format a number of bytes in GiB; empty for 0."""
    return f"{count / 2**30:.2f} GiB" if count else ""


def duration(seconds: float) -> str:
    """Format seconds as ``1 h 02 min 03 s``, omitting leading zero units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min {rest:02d} s"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def markdown_table(head: Row, rows: Iterable[Row]) -> str:
    """Format a Markdown table with aligned columns, all but the first right-aligned."""
    lines = [head, *rows]
    widths = [max(2, *(len(row[column]) for row in lines)) for column in range(len(head))]

    def line(cells: Row) -> str:
        first, *others = zip(cells, widths)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *(line(row) for row in lines[1:])])
