"""Record the result of every cell as a line in a file, so that a long run can be interrupted and continued."""

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
    *("signal in step", "checkpoint", "seconds", "resume"),
)


def fingerprint(root: Path = ROOT) -> str:
    """Return a hash of the code that a cell runs, including the expected results."""
    digest = hashlib.sha256()
    files = (path for name in _CODE for path in (root / name).rglob("*") if path.suffix in (".py", ".txt"))
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Record:
    """The cells that were made with the current code, in a file that may also contain others.

    Args:
        file: the file to append to; created with the first cell.
        code: fingerprint of the code.
    """

    def __init__(self, file: Path, code: str) -> None:
        self.file, self.code = file, code
        self.cells: dict[str, Seen] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            if not line.endswith("}"):  # incomplete line
                continue
            entry = json.loads(line)
            if entry.pop("code") == code:
                lists = {key: tuple(value) for key, value in entry.items() if isinstance(value, list)}
                self.cells[entry["cell"]] = Seen(**{**entry, **lists})

    def add(self, seen: Seen) -> None:
        """Append a cell."""
        self.cells[seen.cell] = seen
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = self.file.read_bytes() if self.file.exists() else b""
        with self.file.open("a") as file:
            file.write("\n" * (not text.endswith(b"\n") and bool(text)))  # after an incomplete line
            file.write(json.dumps({"code": self.code, **dataclasses.asdict(seen)}) + "\n")


def markdown(cells: Iterable[Cell], record: Mapping[str, Seen]) -> list[str]:
    """Return the table, followed by the problems. Cells that were not made are omitted."""
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
    """Return the cells to make: those whose names contain all words of ``only`` and that have not passed."""
    done = {name for name, seen in record.cells.items() if not seen.problems}
    return [cell for cell in table if cell.name not in done and set(only.split()) <= set(cell.name.split())]
