"""Formats of numbers, durations, sizes and tables, for reports and terminals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Sequence[str]
# Ends of the names of sums and counts, from which others compute means, and of speeds.
_NOT_SHOWN = ("_sum", "count/chosen", "count/rejected", "runtime", "_per_second")


def number(value: Any) -> float | None:
    """``value`` as a float if it is a finite number, else None."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if known and math.isfinite(value) else None


def brief(value: float, digits: int = 3) -> str:
    """Format a number with a few significant digits."""
    return f"{value:.{digits}g}".replace("-", "−")


def shown(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Format metrics, without sums, counts and speeds."""
    known = {name: number(value) for name, value in metrics.items() if not name.endswith(_NOT_SHOWN)}
    return {name: brief(value, 5) for name, value in known.items() if value is not None}


def size(count: float) -> str:
    """Format a number of bytes in GiB or, if there are few, in MB; empty for 0."""
    return "" if not count else f"{count / 2**30:.2f} GiB" if count >= 2**30 / 100 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Format seconds as ``1 h 02 min 03 s``, omitting leading zero units."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min {rest:02d} s"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def in_order(name: str) -> list[str | int]:
    """A sort key of names with numbers in them: ``checkpoint-9`` is before ``checkpoint-10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def markdown_table(head: Row, rows: Iterable[Row]) -> str:
    """Format a Markdown table with aligned columns, all but the first right-aligned."""
    lines = [head, *rows]
    widths = [max(2, *(len(row[column]) for row in lines)) for column in range(len(head))]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    padded = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)
