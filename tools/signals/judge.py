"""Compare the result of a cell with the expected result."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.signals.command import End
from tools.signals.plan import OLD, Cell, Expected

KILLED = "killed"


@dataclass(frozen=True)
class Seen:
    """The result of a cell.

    Attributes:
        left: processes that remained after the limit.
        hit: last complete step when the signal was sent.
        resumed: whether the resumed run ended bitwise like an undisturbed one.
        problems: differences from the expected result and from the undisturbed run, and problems of checkpoints.
        output: output of the run if there are problems.
    """

    cell: str
    exit: int | None
    ranks: tuple[str, ...]
    seconds: float
    left: tuple[str, ...]
    state: str
    signal: str
    hit: int
    checkpoint: int
    resumed: bool = True
    problems: tuple[str, ...] = ()
    output: str = ""


def status(output_dir: Path) -> dict[str, Any]:
    """Read ``status.json`` without using the package; empty if it cannot be read."""
    try:
        found = json.loads((output_dir / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def seen(cell: Cell, end: End, output_dir: Path, hit: int, checkpoint: int) -> Seen:
    """Return the result before the run is resumed."""
    found = status(output_dir)
    return Seen(
        cell=cell.name,
        exit=end.code,
        ranks=tuple(KILLED if code is None else str(code) for code in end.ranks),
        seconds=round(end.seconds, 1),
        left=end.left,
        state=str(found.get("state", "-")),
        signal=str(found.get("signal") or "-"),
        hit=hit,
        checkpoint=checkpoint,
    )


def differences(seen: Seen, expected: Expected, scheduled: int) -> list[str]:
    """Return the differences from the expected result; a checkpoint is scheduled every so many steps."""
    problems = [f"{process}: still running" for process in seen.left]
    found = [("launcher's exit status", seen.exit, expected.exits), ("state", seen.state, expected.states)]
    found += [(f"exit status of rank {rank}", code, expected.ranks[rank]) for rank, code in enumerate(seen.ranks)]
    found += [("signal", seen.signal, expected.signals)]
    problems += [f"the {what} is {value}, expected {wanted}" for what, value, wanted in found if value not in wanted]
    before = seen.hit // scheduled * scheduled
    least, most = (before, before) if expected.checkpoint == OLD else (seen.hit, before + scheduled - 1)
    if not least <= seen.checkpoint <= most:
        problems.append(f"the newest checkpoint is of step {seen.checkpoint}, expected {least} to {most}")
    return problems
