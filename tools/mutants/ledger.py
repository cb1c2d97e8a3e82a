"""Store the result of every mutant as a line in a file, so that a long run can be interrupted and continued."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.mutants.mutant import Mutant, package_of
from tools.ranks.client import ROOT

EQUIVALENT = ROOT / "tests" / "mutations" / "equivalent.yaml"


@dataclass(frozen=True)
class Entry:
    """A trial: the mutant, whether and how it was detected, and the state of the tests."""

    file: str
    line: int
    old: str
    new: str
    noticed: bool
    how: str
    tests: str

    @property
    def change(self) -> tuple[str, str, str]:
        """The mutant, independent of its current line number."""
        return self.file, self.old, self.new


class Ledger:
    """Entries in a file. The last entry of a mutant is used."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.entries: dict[tuple[str, str, str], Entry] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            if line.endswith("}"):  # other lines are incomplete
                entry = Entry(**json.loads(line))
                self.entries[entry.change] = entry

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        self.entries[entry.change] = entry
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def is_done(self, mutant: Mutant, tests: str) -> bool:
        """Return whether a trial is not needed: the mutant was detected, or survived the current tests."""
        entry = self.entries.get(mutant.change)
        return entry is not None and (entry.noticed or entry.tests == tests)


def equivalents(file: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Return equivalent mutants and the reasons why no test can detect them."""
    listed: list[dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8")) or [] if file.exists() else []
    return {(entry["file"], entry["old"], entry["new"]): entry["why"] for entry in listed}


def table(entries: Iterable[Entry], known: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return the lines of a table of scores by package, without equivalent mutants."""
    tried: Counter[str] = Counter()
    noticed: Counter[str] = Counter()
    equivalent: Counter[str] = Counter()
    known = set(known)
    for entry in entries:
        package = package_of(entry.file)
        if entry.change in known and not entry.noticed:
            equivalent[package] += 1
            continue
        tried[package] += 1
        noticed[package] += entry.noticed
    rows = [("package", "mutants", "detected", "score", "equivalent")]
    for package in sorted(set(tried) | set(equivalent)):
        rows.append(_row(package, tried[package], noticed[package], equivalent[package]))
    rows.append(_row("all", tried.total(), noticed.total(), equivalent.total()))
    return [f"{name:12} {count:>8} {good:>8} {score:>7} {same:>11}" for name, count, good, score, same in rows]


def _row(name: str, count: int, good: int, same: int) -> tuple[str, str, str, str, str]:
    return name, str(count), str(good), f"{good / count:.0%}" if count else "", str(same)


def survivors(entries: Iterable[Entry], known: Iterable[tuple[str, str, str]]) -> Sequence[Entry]:
    """Return the surviving mutants that are not known to be equivalent."""
    known = set(known)
    return [entry for entry in entries if not entry.noticed and entry.change not in known]
