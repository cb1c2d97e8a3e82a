"""``make signals``: test every launcher, signal and process of ``expected.txt`` on real runs.

Start the run, send the signal, compare what is left with the expected results, resume the run and compare its result.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.chaos.judge import compare, look
from tools.chaos.world import World
from tools.ranks import RankServer, RanksFailed
from tools.signals.command import End, Launched, launch_command
from tools.signals.worker import WORKER, Plan
from tools.trial import offline_runs

STEPS, SCHEDULED = 24, 8  # steps of a run, and between two of its checkpoints
_SLOW_FROM = 10
_OUTPUT = 6000  # number of characters of the output to show
# Ranks alternately wait for each other, so that some signals arrive while their rank is in a collective.
_SLOW_S, _LONG_S = (0.5, 0.1), 25.0


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

    def differences(self, end: End, output_dir: Path, hit: int, checkpoint: int) -> Iterator[str]:
        """Yield the differences from the expected results.

        ``hit`` is the last complete step when the signal was sent, ``checkpoint`` the step of the newest checkpoint.
        """
        yield from (f"{process}: still running" for process in end.left)
        status = output_dir / "status.json"
        told: dict[str, Any] = json.loads(status.read_text()) if status.exists() else {}
        found = [("launcher's exit status", end.code, self.exits), ("state", told.get("state"), self.state)]
        found += [("signal", told.get("signal") or "-", self.reported)]
        for rank, (code, expected) in enumerate(zip(end.ranks, self.codes.split(","), strict=True)):
            found.append((f"exit status of rank {rank}", "killed" if code is None else code, expected))
        for what, value, expected in found:
            if str(value) not in expected.split("|"):
                yield f"the {what} is {value}, expected {expected}"
        before = hit // SCHEDULED * SCHEDULED
        least, most = (before, before) if self.checkpoint == "old" else (hit, before + SCHEDULED - 1)
        if not least <= checkpoint <= most:
            yield f"the newest checkpoint is of step {checkpoint}, expected {least} to {most}"


def table() -> list[Cell]:
    """Return all cells of ``make signals``, which are the lines of ``expected.txt``."""
    text = Path(__file__).with_name("expected.txt").read_text(encoding="utf-8")
    return [Cell(*parts) for line in text.splitlines() if (parts := line.split("#")[0].split())]


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
            problems = [*cell.differences(end, output_dir, hit, max(found.steps, default=0))]
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


def main(argv: Sequence[str] | None = None) -> int:
    """Make the cells; return the exit status, 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.signals", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="only cells whose names contain these words, as 'torchrun TERM'")
    words = set(parser.parse_args(argv).only.split())
    cells, failed = [cell for cell in table() if words <= set(cell.name.split())], 0
    with offline_runs("signals-") as (server, folder):
        signals = Signals(server, folder)
        for number, cell in enumerate(cells, 1):
            problems = signals.make(cell)
            failed += bool(problems)
            said = "".join(f"\n  {problem}" for problem in problems) or "as expected"
            print(f"{number}/{len(cells)} {cell.name}: {said}", flush=True)
    return int(bool(failed) or not cells)


if __name__ == "__main__":
    sys.exit(main())
