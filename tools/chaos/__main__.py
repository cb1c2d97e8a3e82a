"""``make chaos``: kill runs a thousand times, at named points and at random events, and check every restart.

KTO at ZeRO stage 2 and Online DPO at stage 3 alternate, both on two ranks. Each run is killed several times and then
allowed to finish; its result must equal that of a run that was never killed. A failed run can be replayed by its
number, which also continues an interrupted command. Its folder is stored.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tools.chaos.judge import Look, compare, look, lost
from tools.chaos.plan import POINTS, RANKS, Chain, Kill, drawn
from tools.chaos.world import SAVE_TOTAL_LIMIT, STEPS, World
from tools.ranks import Outcome, RankServer, RanksFailed
from tools.ranks.client import ROOT
from tools.signals.worker import WORKER, Plan, Trail
from tools.trial import offline_runs

_TIMEOUT_S, _GRACE_S = 90.0, 25.0


class Attempt(NamedTuple):
    """One attempt of a chain: the planned kill, None for the last; whether it happened; a description; problems."""

    kill: Kill | None
    killed: bool
    said: str
    problems: list[str]


class Chaos:
    """Chains of kills in a folder on a fast disk; output folders of failed chains are copied to ``failed``."""

    def __init__(self, server: RankServer, folder: Path, failed: Path | None = None) -> None:
        self.server, self.folder, self.failed = server, folder, failed
        self.world = World.made(folder / "world")
        self._events: dict[str, list[int]] = {}

    def reference(self, method: str) -> Path:
        """Return the folder of the run that is never killed, which is made on first use."""
        output_dir = self.folder / f"{method}-reference"
        if method not in self._events:
            outcome = self._start(method, output_dir, None)
            if outcome.returncode:
                raise RuntimeError(f"the {method} run that is never killed failed: {outcome.report()}")
            trails = [Trail(self.folder / "ranks", rank) for rank in range(RANKS)]
            self._events[method] = [trail.get("events") or 0 for trail in trails]
        return output_dir

    def _start(self, method: str, output_dir: Path, kill: Kill | None, left: float = 1.0) -> Outcome:
        """Start the ranks of an attempt, of which this fraction of the run is left, and wait for their ends."""
        folder = self.folder / "ranks"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        plan = Plan(str(folder), str(output_dir), rank=RANKS, event="")  # counts events only
        if kill is not None:
            fault, event, occurrence = "crash all" if kill.node_lost else "crash", "", kill.occurrence
            if kill.point is None:
                occurrence = 1 + int(kill.moment * self._events[method][kill.rank] * left)
            else:
                event = POINTS[kill.point].event
            plan = replace(plan, rank=kill.rank, event=event, occurrence=occurrence, fault=fault)
        run, arguments = self.server.run, self.world.arguments(method, output_dir)
        try:
            return run(WORKER, *arguments, timeout=_TIMEOUT_S, grace=_GRACE_S, env=plan.variable(), check=False)
        except RanksFailed as error:
            return error.outcome

    def run(self, chain: Chain) -> Iterator[Attempt]:
        """Run a chain to its end, or to the first problem; yield each attempt."""
        output_dir, reference = self.folder / f"chain-{chain.name}", self.reference(chain.method)
        # Step of a checkpoint -> the steps of the resumes that led to it. An attempt that did not write a new
        # checkpoint leaves no line in the log.
        found, lineage = Look(), dict[int, tuple[int, ...]]({0: ()})
        for number, kill in enumerate([*chain.kills, None], 1):
            before, newest = found, max(found.steps, default=0)
            outcome = self._start(chain.method, output_dir, kill, 1 - newest / STEPS)
            killed = any(rank.code == -9 and not rank.ended for rank in outcome.ranks)
            found = look(output_dir)
            resumes = (*lineage[newest], newest) if newest else ()
            lineage |= {step: resumes for step in found.steps if step > newest}
            problems = [f"rank {rank} did not exit by itself" for rank in outcome.hung]
            if outcome.returncode and not killed:
                problems.append(f"exit status {outcome.returncode} without a kill")
            problems += [*found.problems, *lost(before, found, SAVE_TOTAL_LIMIT)]
            if outcome.returncode == 0:
                problems += compare(output_dir, reference, resumes)
            report = [*(f"  FAILED: {problem}" for problem in problems), outcome.report()] if problems else []
            start = f"{chain.name}.{number} {chain.method} from step {newest}: {kill or 'left alone'}"
            said = "\n".join([f"{start}: {'killed' if killed else 'finished'}", *report])
            yield Attempt(kill, killed, said, problems)
            if problems and self.failed is not None:
                shutil.copytree(output_dir, self.failed / chain.name, dirs_exist_ok=True)
            if problems or outcome.returncode == 0:
                break
        shutil.rmtree(output_dir)


def main(argv: Sequence[str] | None = None) -> int:
    """Run chains until the number of kills is reached; return the exit status: 1 if a restart failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first run; with --kills 1, a replay")
    given = parser.parse_args(argv)
    made, number = list[Attempt](), given.first
    with offline_runs("chaos-") as (server, folder):
        try:
            chaos = Chaos(server, folder, ROOT / "outputs" / "chaos")
            while sum(one.killed for one in made) < given.kills:
                for one in chaos.run(drawn(given.seed, number)):
                    made.append(one)
                    print(one.said, flush=True)
                number += 1
        except KeyboardInterrupt:
            print(f"interrupted; continue with --first {number}")
    killed, failed = sum(one.killed for one in made), sum(bool(one.problems) for one in made)
    print(f"{killed} kills in {number - given.first} runs, {failed} failures")
    return int(bool(failed) or killed < given.kills)


if __name__ == "__main__":
    sys.exit(main())
