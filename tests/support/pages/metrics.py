"""The names of metrics in docs/reference/metrics.md."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from alignment.config.registry import METHODS
from support.pages.blocks import ROOT

_ROW = re.compile(r"^\| `([\w/]+)` \|", re.MULTILINE)


@cache
def documented() -> frozenset[str]:
    """Every name in the first column of a table."""
    return frozenset(_ROW.findall((ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")))


def matches(name: str, documented_name: str) -> bool:
    """Whether a name is the documented one, in which ``NAME`` stands for any text."""
    pattern = ".+".join(map(re.escape, documented_name.split("NAME")))
    return re.fullmatch(pattern, name) is not None


def undocumented(log: Path) -> set[str]:
    """Names in the metrics of a run's log.jsonl that are not documented; ``eval_`` and a set's name are taken off.

    Metrics of a method that is defined outside the package are its author's to document.
    """
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    if any(record.get("event") == "start" and record["method"] not in METHODS for record in records):
        return set()
    return {name for record in records if "event" not in record for name in record if not _known(name)}


def _known(name: str) -> bool:
    candidates = [name]
    if name.startswith("eval_"):
        rest = name.removeprefix("eval_")
        candidates += [rest, *(rest[match.end() :] for match in re.finditer("_", rest))]
        candidates += [f"eval_{candidate}" for candidate in candidates[1:]]
    return any(matches(candidate, one) for candidate in candidates for one in documented())
