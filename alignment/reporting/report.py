"""The report at the end of a run, as Markdown that is also readable in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from alignment.reporting.log_reading import is_mean

Row = Sequence[str]


def report_text(
    title: str,
    facts: Iterable[tuple[str, str]],
    phases: Mapping[str, Mapping[str, float]],
    memory: str,
    train: Mapping[str, float],
    evaluation: Mapping[str, float],
    advice: Iterable[str] = (),
) -> str:
    """The report of a run as Markdown.

    Args:
        title, facts, advice: text; facts are names and values, such as ``("steps", "150")``.
        phases: totals by name: seconds, tokens, peak_bytes, entries.
        memory: column header of the peaks, such as ``GPU memory``.
        train, evaluation: the last metrics, without the prefix ``eval_``.
    """
    total = sum(phase["seconds"] for phase in phases.values()) or 1.0
    times = [
        (
            name,
            f"{int(phase['entries'])}",
            f"{phase['seconds']:.2f}",
            f"{100 * phase['seconds'] / total:.0f}%",
            f"{phase['tokens'] / phase['seconds']:,.0f}" if phase["tokens"] and phase["seconds"] else "",
            gibibytes(phase["peak_bytes"]),
        )
        for name, phase in phases.items()
    ]
    head = ("phase", "times", "seconds", "share", "tokens/s", memory)
    parts = [f"# {title}", "\n".join(f"- {name}: {value}" for name, value in facts)]
    parts += ["## Phases", markdown_table(head, times)]
    if train or evaluation:
        there = [(values, name) for values, name in ((train, "training"), (evaluation, "evaluation")) if values]
        names = dict.fromkeys(name for name in (*train, *evaluation) if is_mean(name))
        rows = [(name, *(f"{one[name]:.6g}" if name in one else "" for one, _ in there)) for name in names]
        parts += ["## Final metrics", markdown_table(("metric", *(name for _, name in there)), rows)]
    if advised := "\n".join(f"- {text}" for text in advice):
        parts += ["## Advice", advised]
    return "\n\n".join(parts) + "\n"


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
