"""Pages of docs/reference/ of which a part is generated, and their tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from tools.ranks.client import ROOT

REFERENCE = ROOT / "docs" / "reference"
_COMMENT = re.compile(r"^<!-- written by .+ -->\n", re.MULTILINE)


def with_generated(name: str, lines: Iterable[str]) -> str:
    """Return the text of a page with everything after its comment ``<!-- written by … -->`` replaced by ``lines``."""
    page = (REFERENCE / name).read_text(encoding="utf-8")
    comment = _COMMENT.search(page)
    assert comment is not None, f"{name} has no comment that starts its generated part"
    return page[: comment.end()] + "\n" + re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def table(columns: str, rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a table; ``columns`` is its first line without the outer bars, such as ``name | value``."""
    yield from (f"| {columns} |", "|" + "---|" * len(columns.split("|")))
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)
