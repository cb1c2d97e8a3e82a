"""Read the completions of the first and the last step of a run, for its report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignment.reporting.html.content import Completion, CompletionGroup
from alignment.reporting.log_reading import number

_CHUNK = 1 << 20  # bytes to read from each end of the file
_MOST = 6  # maximum number of prompts per group
_LONGEST = 1500  # maximum number of characters per text
_SKIPPED = ("step", "prompt", "dataset")
_NAMES = {"policy": "policy", "reference": "reference", "completion": "policy"}

Row = Mapping[str, Any]


def completion_groups(path: Path) -> list[CompletionGroup]:
    """Group the completions in ``completions.jsonl``: before and after for common prompts, otherwise by step.

    Args:
        path: the file, which can be missing, damaged or incomplete.
    """
    rows = _rows(path)
    if not rows:
        return []
    steps = sorted({row["step"] for row in rows})
    first = [row for row in rows if row["step"] == steps[0]]
    last = [row for row in rows if row["step"] == steps[-1]]
    if len(steps) == 1:
        return [_group(last)]
    before = {_key(row): row for row in first}
    pairs = [(before[_key(row)], row) for row in last if _key(row) in before]
    if not pairs:
        return [_group(first), _group(last)]
    groups = []
    for name in dict.fromkeys(str(row.get("dataset") or "") for _, row in pairs):
        own = [pair for pair in pairs if str(pair[1].get("dataset") or "") == name]
        which = name.removeprefix("eval").removeprefix("_")
        title = f"Before and after: steps {steps[0]} and {steps[-1]}" + (f", {which}" if which else "")
        groups.append(CompletionGroup(title, [_compared(*pair) for pair in own[:_MOST]], len(own)))
    return groups


def _rows(path: Path) -> list[Row]:
    """Read the rows near both ends of the file: those of the first and the last step, possibly of others."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            head = file.read(_CHUNK)
            tail = b""
            if size > len(head):
                file.seek(max(len(head), size - _CHUNK))
                tail = file.read().partition(b"\n")[2]
    except OSError:
        return []
    found = list[Row]()
    for line in (head + (b"\n" + tail if tail else b"")).split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and isinstance(row.get("prompt"), str):
            found.append(row)
    return found


def _key(row: Row) -> tuple[Any, str]:
    return str(row.get("dataset")), row["prompt"]


def _group(rows: Sequence[Row]) -> CompletionGroup:
    shown = [Completion(_cut(row["prompt"]), _texts(row), _scores(row)) for row in rows[:_MOST]]
    return CompletionGroup(f"Step {rows[0]['step']}", shown, len(rows))


def _compared(before: Row, after: Row) -> Completion:
    """The texts of both steps side by side; what did not change, such as the reference's, once."""
    texts = dict[str, str]()
    for name, text in _texts(after).items():
        earlier = _texts(before).get(name)
        if name == "reference" and earlier in (None, text):
            texts = {name: text, **texts}
        else:
            texts |= {} if earlier is None else {f"{name}, step {before['step']}": earlier}
            texts[f"{name}, step {after['step']}"] = text
    return Completion(_cut(after["prompt"]), texts, _scores(after))


def _texts(row: Row) -> dict[str, str]:
    texts = {name: value for name, value in row.items() if isinstance(value, str) and name not in _SKIPPED}
    return {_NAMES.get(name, name.replace("_", " ")): _cut(text) for name, text in texts.items()}


def _scores(row: Row) -> dict[str, float]:
    return {
        name.replace("_", " "): value
        for name, each in row.items()
        if name not in _SKIPPED and (value := number(each)) is not None
    }


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
