"""The cells (launcher, signal and process) and their expected results, read from ``expected.txt``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("expected.txt")
OLD = "old"


@dataclass(frozen=True)
class Cell:
    """A launcher, a signal and the process that receives it, and the method being trained."""

    launcher: str
    target: str
    signal: str
    method: str

    @property
    def name(self) -> str:
        """The name of the cell."""
        return f"{self.launcher} {self.target} {self.signal} {self.method}"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return 1 if self.launcher == "python" else 2


@dataclass(frozen=True)
class Expected:
    """The expected result of a cell as in ``expected.txt``; each entry contains the alternatives."""

    exits: tuple[int, ...]
    ranks: tuple[tuple[str, ...], ...]
    states: tuple[str, ...]
    signals: tuple[str, ...]
    checkpoint: str


def table() -> dict[Cell, Expected]:
    """Return all cells of ``make signals``."""
    cells: dict[Cell, Expected] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        parts = line.split("#")[0].split()
        if parts:
            exits, ranks, states, signals, checkpoint = parts[4:]
            cells[Cell(*parts[:4])] = Expected(
                exits=tuple(map(int, exits.split("|"))),
                ranks=tuple(tuple(one.split("|")) for one in ranks.split(",")),
                states=tuple(states.split("|")),
                signals=tuple(signals.split("|")),
                checkpoint=checkpoint,
            )
    return cells
