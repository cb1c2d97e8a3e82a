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
        cell: name of the cell.
        exit: exit status of the launcher; None if it had to be killed.
        ranks: exit status of each rank, as text.
        seconds: time until all processes had exited.
        left: processes that remained after the limit.
        state, signal: values in ``status.json``; ``-`` for none.
        hit: last complete step when the signal was sent.
        checkpoint: step of the newest checkpoint; 0 for none.
        resumed: whether the resumed run ended bitwise like an undisturbed one.
        problems: differences from the expected result, one line each, including problems of checkpoints and
            differences from the undisturbed run.
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
    """Return the differences from the expected result.

    Args:
        seen: the result of the cell.
        expected: the expected result.
        scheduled: number of steps between two scheduled checkpoints.
    """
    problems = [f"{process}: still running" for process in seen.left]
    if seen.exit not in expected.exits:
        problems.append(f"the launcher exited with {seen.exit}, expected {_either(expected.exits)}")
    for rank, (code, codes) in enumerate(zip(seen.ranks, expected.ranks, strict=True)):
        if code not in codes:
            problems.append(f"rank {rank} exited with {code}, expected {_either(codes)}")
    if seen.state not in expected.states:
        problems.append(f"the state is {seen.state}, expected {_either(expected.states)}")
    if seen.signal not in expected.signals:
        problems.append(f"the signal is {seen.signal}, expected {_either(expected.signals)}")
    before = seen.hit // scheduled * scheduled
    if expected.checkpoint == OLD and seen.checkpoint != before:
        problems.append(f"the newest checkpoint is of step {seen.checkpoint}, expected {before}")
    elif expected.checkpoint != OLD and not seen.hit <= seen.checkpoint < before + scheduled:
        problems.append(
            f"the newest checkpoint is of step {seen.checkpoint}, but the signal was sent in step {seen.hit}"
        )
    return problems


def _either(values: tuple[Any, ...]) -> str:
    return " or ".join(map(str, values))
