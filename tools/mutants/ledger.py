"""What has become of the mutants of a sample, line by line in a file, so that a long run can be interrupted."""

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
    """A trial: the mutant, whether it was noticed and how, and the state of the tests that it was tried with."""

    file: str
    line: int
    old: str
    new: str
    noticed: bool
    how: str
    tests: str

    @property
    def change(self) -> tuple[str, str, str]:
        """The mutant, wherever its line is now."""
        return self.file, self.old, self.new


class Ledger:
    """Entries in a file; the last one of a mutant counts."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.entries: dict[tuple[str, str, str], Entry] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            if line.endswith("}"):  # others were cut off
                entry = Entry(**json.loads(line))
                self.entries[entry.change] = entry

    def add(self, entry: Entry) -> None:
        """Write an entry."""
        self.entries[entry.change] = entry
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def is_done(self, mutant: Mutant, tests: str) -> bool:
        """Whether nothing new can come of a trial: it was noticed before, or missed by these very tests."""
        entry = self.entries.get(mutant.change)
        return entry is not None and (entry.noticed or entry.tests == tests)


def equivalents(file: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Why each of these mutants changes nothing that a test could see."""
    listed: list[dict[str, Any]] = yaml.safe_load(file.read_text(encoding="utf-8")) or [] if file.exists() else []
    return {(entry["file"], entry["old"], entry["new"]): entry["why"] for entry in listed}


def table(entries: Iterable[Entry], known: Iterable[tuple[str, str, str]]) -> list[str]:
    """Lines of a table of scores by package; a mutant that is equivalent counts for nothing."""
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
    rows = [("package", "mutants", "noticed", "score", "equivalent")]
    for package in sorted(set(tried) | set(equivalent)):
        rows.append(_row(package, tried[package], noticed[package], equivalent[package]))
    rows.append(_row("all", tried.total(), noticed.total(), equivalent.total()))
    return [f"{name:12} {count:>8} {good:>8} {score:>7} {same:>11}" for name, count, good, score, same in rows]


def _row(name: str, count: int, good: int, same: int) -> tuple[str, str, str, str, str]:
    return name, str(count), str(good), f"{good / count:.0%}" if count else "", str(same)


def survivors(entries: Iterable[Entry], known: Iterable[tuple[str, str, str]]) -> Sequence[Entry]:
    """The mutants that nothing noticed and that are not known to be equivalent."""
    known = set(known)
    return [entry for entry in entries if not entry.noticed and entry.change not in known]
