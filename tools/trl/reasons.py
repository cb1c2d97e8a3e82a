"""The tests that do not pass and the reasons: a strict file, and a fixed list of reasons."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

EXPECTED = Path(__file__).with_name("expected.txt")


class Reason(enum.Enum):
    """Why a test of TRL does not pass; the value is an explanation."""

    VISION = "is about images"
    VLLM = "generates with vLLM"
    LIGER = "uses Liger's kernels, which need a GPU"
    GPU = "needs a GPU, or several"
    SLOW = "is one of TRL's slow tests"
    SKIPPED = "is skipped by TRL itself with these versions of the libraries"
    PRIVATE = "uses a helper that TRL's documentation does not name"
    DIFFERENT = "changed on purpose: see docs/guides/coming-from-trl.md"
    UNSUPPORTED = "not supported here, and refused by name"
    PACKAGE = "needs a package that is not installed"
    NETWORK = "needs the network"
    OPEN = "ought to pass, and does not yet"


LEFT_OUT = frozenset(
    (Reason.VISION, Reason.VLLM, Reason.LIGER, Reason.GPU, Reason.SLOW, Reason.SKIPPED, Reason.PRIVATE)
    + (Reason.PACKAGE, Reason.NETWORK)
)
"""Reasons for which a test cannot run, regardless of this package."""


@dataclass(frozen=True)
class Line:
    """An entry of the file.

    Attributes:
        reason: None until it has been set manually.
        remark: a short explanation.
    """

    reason: Reason | None
    remark: str = ""


def read(text: str) -> dict[str, Line]:
    """Parse the entries by test: lines of ``test | REASON | remark`` below headings in square brackets.

    Raises:
        ValueError: a line is invalid or has an unknown reason, or a test occurs twice.
    """
    entries: dict[str, Line] = {}
    heading = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("["):
            heading = line.strip("[]")
            continue
        parts = [part.strip() for part in line.split(" | ", 2)]
        if len(parts) < 2 or not heading:
            raise ValueError(f"line {number}: expected `test | REASON | remark` below a [release/file]")
        if parts[1] != "?" and parts[1] not in Reason.__members__:
            raise ValueError(f"line {number}: {parts[1]} is not one of {', '.join(Reason.__members__)}")
        name = f"{heading}::{parts[0]}"
        if name in entries:
            raise ValueError(f"line {number}: {name} occurs twice")
        entries[name] = Line(Reason.__members__.get(parts[1]), parts[2] if len(parts) > 2 else "")
    return entries


def write(entries: Mapping[str, Line]) -> str:
    """Return the text of the file, including its header."""
    lines = [
        "# Tests of TRL that do not pass here. `python -m tools.trl --update CHECKOUT...` adds and removes lines;"
    ]
    lines += ["# a reason (tools/trl/reasons.py) is chosen by a person, but for what a test's own marks say."]
    heading = ""
    for name, line in entries.items():
        file, _, test = name.partition("::")
        if file != heading:
            heading = file
            lines += ["", f"[{file}]"]
        parts = (test, line.reason.name if line.reason else "?", line.remark)
        lines.append(" | ".join(part for part in parts if part))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a test.

    Attributes:
        passed: whether it ran and passed.
        reason: reason given by the test's markers, or by the use of a private helper; None if it failed.
        detail: the error, or why it was skipped, in one line.
        seconds: wall-clock time.
    """

    passed: bool
    reason: Reason | None = None
    detail: str = ""
    seconds: float = 0.0


def problems(outcomes: Mapping[str, Outcome], entries: Mapping[str, Line]) -> list[str]:
    """Return the errors in the file about the tests that ran; empty if it is correct."""
    found = []
    for name, outcome in outcomes.items():
        line = entries.get(name)
        if outcome.passed and line:
            found.append(f"{name} passes: remove its line")
        elif not outcome.passed and line is None:
            found.append(f"{name} does not pass, but is not in the file: {outcome.detail}")
        elif line and line.reason is None:
            found.append(f"{name} has no reason: {line.remark}")
    return found


def updated(outcomes: Mapping[str, Outcome], entries: Mapping[str, Line]) -> dict[str, Line]:
    """Update the entries with the outcomes, keeping reasons, remarks and the entries of other tests."""
    kept = {name: line for name, line in entries.items() if name not in outcomes or not outcomes[name].passed}
    for name, outcome in outcomes.items():
        if not outcome.passed and (name not in kept or kept[name].reason is None):
            remark = outcome.detail if outcome.reason is None else ""
            kept[name] = Line(outcome.reason, remark.replace(" | ", " / ")[:160])
    return dict(sorted(kept.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[tuple[int, ...], str]:
    release = name.partition("/")[0]
    return tuple(int(part) for part in release.split(".") if part.isdigit()), name


def table(outcomes: Mapping[str, Outcome], entries: Mapping[str, Line]) -> list[str]:
    """Return a Markdown table with the numbers of tests, runnable tests and passed tests by release and file."""
    counts: dict[tuple[str, str], list[int]] = {}
    for name, outcome in outcomes.items():
        release, _, file = name.partition("::")[0].partition("/")
        line = entries.get(name)
        reason = line.reason if line and line.reason else outcome.reason
        for key in ((release, file), ("all", "")):
            row = counts.setdefault(key, [0, 0, 0])
            row[0] += 1
            row[1] += outcome.passed or reason not in LEFT_OUT
            row[2] += outcome.passed
    lines = ["| release | file | tests | runnable | passed |", "|---|---|---|---|---|"]
    ordered = sorted(counts, key=lambda key: (key[0] == "all", _order(key[0])))
    return lines + [f"| {' | '.join(map(str, (*key, *counts[key])))} |" for key in ordered]


def by_reason(outcomes: Mapping[str, Outcome], entries: Mapping[str, Line]) -> list[str]:
    """Return a Markdown table with the number of tests that do not pass, by reason."""
    counts: dict[Reason | None, int] = {}
    for name, outcome in outcomes.items():
        if not outcome.passed:
            reason = entries[name].reason if name in entries else outcome.reason
            counts[reason] = counts.get(reason, 0) + 1
    return ["| reason | tests | |", "|---|---|---|"] + [
        f"| {reason.name if reason else '?'} | {count} | {reason.value if reason else 'no reason yet'} |"
        for reason, count in sorted(counts.items(), key=lambda item: -item[1])
    ]


def names(entries: Iterable[str], only: str) -> list[str]:
    """Return the names that contain all words of ``only``."""
    return [name for name in entries if all(word in name for word in only.split())]
