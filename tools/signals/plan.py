"""The cells (launcher, signal and process) and their expected results, read from ``expected.txt``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alignment.config.errors import counted

TABLE = Path(__file__).with_name("expected.txt")
NEW, OLD = "new", "old"
LAUNCHERS = ("python", "deepspeed", "torchrun", "torchrun+USR1")
TARGETS = ("launcher", "launch.py", "group", "rank0", "rank1", "folder")
SIGNALS = ("TERM", "HUP", "USR1", "INT", "INT2", "KILL", "STOP")
_COLUMNS = 9


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
    """The expected result of a cell; each entry contains the alternatives.

    Attributes:
        exits: exit statuses of the launcher, negative if a signal killed it.
        ranks: exit statuses of each rank, as text; ``killed`` if a signal killed it.
        states: states in ``status.json``.
        signals: signals in ``status.json``; ``-`` for none.
        checkpoint: :data:`NEW` or :data:`OLD`.
    """

    exits: tuple[int, ...]
    ranks: tuple[tuple[str, ...], ...]
    states: tuple[str, ...]
    signals: tuple[str, ...]
    checkpoint: str


def read(text: str) -> dict[Cell, Expected]:
    """Parse the table.

    Raises:
        ValueError: a line is invalid, or a cell occurs twice.
    """
    cells: dict[Cell, Expected] = {}
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split("#")[0].split()
        if not parts:
            continue
        if len(parts) != _COLUMNS:
            raise ValueError(f"line {number}: {len(parts)} columns, expected {_COLUMNS}")
        cell = Cell(*parts[:4])
        exits, ranks, states, signals, checkpoint = parts[4:]
        known = ((cell.launcher, LAUNCHERS), (cell.target, TARGETS), (cell.signal, SIGNALS), (checkpoint, (NEW, OLD)))
        for value, choices in known:
            if value not in choices:
                raise ValueError(f"line {number}: {value} is not one of {', '.join(choices)}")
        expected = Expected(
            exits=tuple(map(int, exits.split("|"))),
            ranks=tuple(tuple(one.split("|")) for one in ranks.split(",")),
            states=tuple(states.split("|")),
            signals=tuple(signals.split("|")),
            checkpoint=checkpoint,
        )
        if len(expected.ranks) != cell.ranks:
            raise ValueError(f"line {number}: {len(expected.ranks)} exit statuses for {counted(cell.ranks, 'rank')}")
        if cell in cells:
            raise ValueError(f"line {number}: {cell.name} occurs twice")
        cells[cell] = expected
    return cells


def table() -> dict[Cell, Expected]:
    """Return all cells of ``make signals``."""
    return read(TABLE.read_text(encoding="utf-8"))
