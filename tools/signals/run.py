"""Make cells: start the run, send the signal, check the files, resume the run and compare the result."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from tools.chaos.judge import compare, look
from tools.chaos.world import World
from tools.ranks import RankServer, RanksFailed
from tools.signals.command import Launched, launch_command
from tools.signals.judge import Seen, differences, seen
from tools.signals.plan import Cell, Expected
from tools.signals.worker import Plan

STEPS, SCHEDULED = 24, 8  # steps of a run, and between two of its checkpoints
_SLOW_FROM = 10
_OUTPUT = 6000  # number of characters of the output to keep
WORKER = Path(__file__).with_name("worker.py")
# Ranks alternately wait for each other, so that some signals arrive while their rank is in a collective.
_SLOW_S, _LONG_S = (0.5, 0.1), 25.0


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

    def make(self, cell: Cell, expected: Expected) -> Seen:
        """Make one cell."""
        self._made += 1
        place = self.folder / f"cell-{self._made}"
        place.mkdir()
        try:
            return self._make(cell, expected, place)
        finally:
            shutil.rmtree(place)

    def _make(self, cell: Cell, expected: Expected, place: Path) -> Seen:
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
        told = seen(cell, end, output_dir, hit, max(found.steps, default=0))
        after = self.go_on(cell.method, cell.ranks, output_dir)
        problems = (*differences(told, expected, SCHEDULED), *found.problems, *after)
        text = run.text()[-_OUTPUT:] if problems else ""
        return dataclasses.replace(told, resumed=not after, problems=problems, output=text)

    def go_on(self, method: str, ranks: int, output_dir: Path) -> list[str]:
        """Resume the run with the same command, and compare its result with the reference."""
        newest = look(output_dir).steps[-1:]
        try:
            self.server.run(self.program, *self.arguments(method, output_dir), nproc=ranks)
        except RanksFailed as error:
            return [f"the run cannot be resumed: {error.outcome.report()}"]
        extra = [step for step in newest if step % SCHEDULED]
        shutil.rmtree(output_dir / f"checkpoint-{extra[0]}") if extra else None
        return compare(output_dir, self.reference(method, ranks), newest)
