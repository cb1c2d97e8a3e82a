"""The cells of ``expected.txt`` (launcher, process, signal, method), and what differs from their expected results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.signals.command import End

TABLE = Path(__file__).with_name("expected.txt")


@dataclass(frozen=True)
class Cell:
    """A launcher, the process that receives a signal, the signal, and the method being trained.

    The other attributes are the expected results as in ``expected.txt``, with ``|`` between alternatives.
    """

    launcher: str
    target: str
    signal: str
    method: str
    exits: str
    codes: str
    state: str
    reported: str
    checkpoint: str

    @property
    def name(self) -> str:
        """The name of the cell."""
        return f"{self.launcher} {self.target} {self.signal} {self.method}"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 if self.launcher == "python" else 2


def table() -> list[Cell]:
    """Return all cells of ``make signals``."""
    lines = (line.split("#")[0].split() for line in TABLE.read_text(encoding="utf-8").splitlines())
    return [Cell(*parts) for parts in lines if parts]


def status(output_dir: Path) -> dict[str, Any]:
    """Read ``status.json`` without using the package; empty if it cannot be read."""
    try:
        found = json.loads((output_dir / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def differences(cell: Cell, end: End, output_dir: Path, hit: int, checkpoint: int, scheduled: int) -> Iterator[str]:
    """Yield the differences from the expected result.

    ``hit`` is the last complete step when the signal was sent, ``checkpoint`` the step of the newest checkpoint, and
    ``scheduled`` the number of steps between two scheduled ones.
    """
    yield from (f"{process}: still running" for process in end.left)
    told = status(output_dir)
    found = [("launcher's exit status", end.code, cell.exits), ("state", told.get("state"), cell.state)]
    found += [("signal", told.get("signal") or "-", cell.reported)]
    found += [
        (f"exit status of rank {rank}", "killed" if code is None else code, expected)
        for rank, (code, expected) in enumerate(zip(end.ranks, cell.codes.split(","), strict=True))
    ]
    for what, value, expected in found:
        if str(value) not in expected.split("|"):
            yield f"the {what} is {value}, expected {expected}"
    before = hit // scheduled * scheduled
    least, most = (before, before) if cell.checkpoint == "old" else (hit, before + scheduled - 1)
    if not least <= checkpoint <= most:
        yield f"the newest checkpoint is of step {checkpoint}, expected {least} to {most}"
