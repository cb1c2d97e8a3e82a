"""Make cells: start the run, send the signal, check the files, resume the run and compare the result."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.chaos.judge import compare, look
from tools.chaos.world import World
from tools.ranks import RankServer, RanksFailed
from tools.signals.command import Launched, launch_command
from tools.signals.judge import Cell, differences
from tools.signals.worker import Plan

STEPS, SCHEDULED = 24, 8  # steps of a run, and between two of its checkpoints
_SLOW_FROM = 10
_OUTPUT = 6000  # number of characters of the output to show
WORKER = Path(__file__).with_name("worker.py")
# Ranks alternately wait for each other, so that some signals arrive while their rank is in a collective.
_SLOW_S, _LONG_S = (0.5, 0.1), 25.0


class Signals:
    """Cells in a folder; the server forks the ranks of undisturbed and of resumed runs."""

    def __init__(self, server: RankServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.world = World.made(folder / "world")
        self.program = server.root / "launch" / "train.py"

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

    def make(self, cell: Cell) -> list[str]:
        """Make one cell; return the differences from its expected result, followed by the output if there are any."""
        place = self.folder / "cell"
        output_dir, log, long = place / "out", place / "log", cell.signal == "INT2"
        place.mkdir()
        slow = (_LONG_S, _LONG_S) if long else _SLOW_S[:: 1 if cell.target == "rank1" else -1]
        plan = Plan(str(place / "trails"), str(output_dir), slow_from=_SLOW_FROM, slow=slow)
        command = launch_command(WORKER, cell.ranks, cell.launcher)
        run = Launched([*command, *self.arguments(cell.method, output_dir)], plan, cell.ranks, log)
        try:
            run.wait_for_step(_SLOW_FROM + (0 if long else 1))
            hit = min(trail.get("step") or 0 for trail in run.trails) - 1
            run.send(cell.target, cell.signal)
            end = run.wait()
            found = look(output_dir)
            problems = [*differences(cell, end, output_dir, hit, max(found.steps, default=0), SCHEDULED)]
            problems += [*found.problems, *self.go_on(cell.method, cell.ranks, output_dir)]
            return [*problems, run.text()[-_OUTPUT:]] if problems else []
        finally:
            run.end()
            shutil.rmtree(place)

    def go_on(self, method: str, ranks: int, output_dir: Path) -> list[str]:
        """Resume the run with the same command, and compare its result with the reference."""
        newest = look(output_dir).steps[-1:]
        try:
            self.server.run(self.program, *self.arguments(method, output_dir), nproc=ranks)
        except RanksFailed as error:
            return [f"the run cannot be resumed: {error.outcome.report()}"]
        for step in newest:
            if step % SCHEDULED:  # the reference has no such checkpoint
                shutil.rmtree(output_dir / f"checkpoint-{step}")
        return compare(output_dir, self.reference(method, ranks), newest)
