"""Formats of durations, sizes and tables, for reports and terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Row = Sequence[str]


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
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    padded = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)
