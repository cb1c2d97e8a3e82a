"""Make cells: start the run, send the signal, check the files, resume the run and compare the result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tools.chaos.judge import compare, look
from tools.chaos.world import World
from tools.ranks import RankServer, RanksFailed
from tools.signals.command import End, Launched, launch_command
from tools.signals.plan import OLD, Cell, Expected
from tools.signals.worker import Plan

STEPS, SCHEDULED = 24, 8  # steps of a run, and between two of its checkpoints
_SLOW_FROM = 10
_OUTPUT = 6000  # number of characters of the output to show
WORKER = Path(__file__).with_name("worker.py")
# Ranks alternately wait for each other, so that some signals arrive while their rank is in a collective.
_SLOW_S, _LONG_S = (0.5, 0.1), 25.0


def status(output_dir: Path) -> dict[str, Any]:
    """Read ``status.json`` without using the package; empty if it cannot be read."""
    try:
        found = json.loads((output_dir / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Signals:
    """Cells in a folder; the server forks the ranks of undisturbed and of resumed runs."""

    def __init__(self, server: RankServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.world = World.made(folder / "world")
        self.program = server.root / "launch" / "train.py"
        self._made = 0

    def arguments(self, method: str, output_dir: Path, **changes: object) -> list[str]:
        """Return the arguments of ``launch/train.py``, the same for every attempt."""
        own = {"max_steps": STEPS, "save_steps": SCHEDULED, "eval_steps": SCHEDULED, "save_total_limit": 100}
        return self.world.arguments(method, output_dir, **(own | changes))

    def reference(self, method: str, ranks: int) -> Path:
        """Return the folder of the undisturbed run, which is made on first use."""
        output_dir = self.folder / f"{method}-{ranks}"
        if not output_dir.exists():
            self.server.run(self.program, *self.arguments(method, output_dir), nproc=ranks)
        return output_dir

    def make(self, cell: Cell, expected: Expected) -> list[str]:
        """Make one cell; return what is wrong, followed by the output."""
        self._made += 1
        place = self.folder / f"cell-{self._made}"
        place.mkdir()
        try:
            return self._make(cell, expected, place)
        finally:
            shutil.rmtree(place)

    def _make(self, cell: Cell, expected: Expected, place: Path) -> list[str]:
        output_dir = place / "out"
        long = cell.signal == "INT2"
        plan = Plan(
            folder=str(place / "trails"),
            output_dir=str(output_dir),
            slow_from=_SLOW_FROM,
            slow=(_LONG_S, _LONG_S) if long else _SLOW_S[:: 1 if cell.target == "rank1" else -1],
        )
        command = launch_command(WORKER, cell.ranks, cell.launcher)
        run = Launched([*command, *self.arguments(cell.method, output_dir)], plan, cell.ranks, place / "log")
        try:
            run.wait_for_step(_SLOW_FROM + (0 if long else 1))
            hit = min(trail.get("step") or 0 for trail in run.trails) - 1
            run.send(cell.target, cell.signal)
            end = run.wait()
        finally:
            run.end()
        found = look(output_dir)
        problems = [*_differences(end, output_dir, expected), *found.problems]
        newest, before = max(found.steps, default=0), hit // SCHEDULED * SCHEDULED
        least, most = (before, before) if expected.checkpoint == OLD else (hit, before + SCHEDULED - 1)
        if not least <= newest <= most:
            problems.append(f"the newest checkpoint is of step {newest}, expected {least} to {most}")
        problems += self.resume(cell.method, cell.ranks, output_dir)
        return [*problems, run.text()[-_OUTPUT:]] if problems else []

    def resume(self, method: str, ranks: int, output_dir: Path) -> list[str]:
        """Resume the run with the same command, and compare its result with the reference."""
        newest = look(output_dir).steps[-1:]
        try:
            self.server.run(self.program, *self.arguments(method, output_dir), nproc=ranks)
        except RanksFailed as error:
            return [f"the run cannot be resumed: {error.outcome.report()}"]
        extra = [step for step in newest if step % SCHEDULED]
        shutil.rmtree(output_dir / f"checkpoint-{extra[0]}") if extra else None
        return compare(output_dir, self.reference(method, ranks), newest)


def _differences(end: End, output_dir: Path, expected: Expected) -> list[str]:
    """Return the differences of exit statuses and of ``status.json`` from the expected result."""
    told = status(output_dir)
    found: list[tuple[str, Any, tuple[Any, ...]]] = [
        ("launcher's exit status", end.code, expected.exits),
        ("state", str(told.get("state", "-")), expected.states),
        ("signal", str(told.get("signal") or "-"), expected.signals),
    ]
    for rank, code in enumerate(end.ranks):
        found.append((f"exit status of rank {rank}", "killed" if code is None else str(code), expected.ranks[rank]))
    problems = [f"the {what} is {value}, expected {wanted}" for what, value, wanted in found if value not in wanted]
    return [f"{process}: still running" for process in end.left] + problems
