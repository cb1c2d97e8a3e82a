"""What became of every cell, line by line in a file, so that a long run can be interrupted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.ranks.client import ROOT
from tools.signals.judge import Seen
from tools.signals.plan import Cell, Expected

_CODE = ("alignment", "launch", "tools/signals", "tools/chaos")
_HEAD = (
    *("launcher", "to", "signal", "method", "exit status", "ranks", "status.json"),
    *("hit in step", "checkpoint", "seconds", "resume"),
)


def fingerprint(root: Path = ROOT) -> str:
    """A hash of the code that a cell runs; what is expected of it counts as well."""
    digest = hashlib.sha256()
    files = (path for name in _CODE for path in (root / name).rglob("*") if path.suffix in (".py", ".txt"))
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Record:
    """The cells that were made with this very code, in a file that also holds others.

    Args:
        file: appended to; made with the first cell.
        code: fingerprint.
    """

    def __init__(self, file: Path, code: str) -> None:
        self.file, self.code = file, code
        self.cells: dict[str, Seen] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            if not line.endswith("}"):  # cut off
                continue
            entry = json.loads(line)
            if entry.pop("code") == code:
                lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
                self.cells[entry["cell"]] = Seen(**{**entry, **lists})

    def add(self, seen: Seen) -> None:
        """Write a cell."""
        self.cells[seen.cell] = seen
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = self.file.read_bytes() if self.file.exists() else b""
        with self.file.open("a") as file:
            file.write("\n" * (not text.endswith(b"\n") and bool(text)))  # after a line that was cut off
            file.write(json.dumps({"code": self.code, **dataclasses.asdict(seen)}) + "\n")


def markdown(cells: Iterable[Cell], record: Mapping[str, Seen]) -> list[str]:
    """The table, and below it what is wrong; cells that were not made are left out."""
    lines = [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    wrong: list[str] = []
    for cell in cells:
        if cell.name not in record:
            continue
        one = record[cell.name]
        state = one.state if one.signal == "-" else f"{one.state}, {one.signal}"
        values: tuple[object, ...] = (
            cell.launcher,
            cell.target,
            cell.signal,
            cell.method,
            one.exit,
            ", ".join(one.ranks),
            state,
        )
        values = (*values, one.hit + 1, one.checkpoint, one.seconds, "bitwise" if one.resumed else "no")
        lines.append(f"| {' | '.join(map(str, values))} |")
        wrong += [f"- {cell.name}: {problem}" for problem in one.problems]
    return [*lines, *([""] if wrong else []), *wrong]


def wanted(table: Mapping[Cell, Expected], record: Record, only: str) -> list[Cell]:
    """The cells that are still to be made: those whose name holds every word of ``only``, but for what has passed."""
    done = {name for name, seen in record.cells.items() if not seen.problems}
    return [cell for cell in table if cell.name not in done and set(only.split()) <= set(cell.name.split())]
