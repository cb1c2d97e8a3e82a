"""Run chains of kills: start, kill, check, restart, and compare the result with a run that was never killed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tools.chaos.judge import Look, compare, look, lost
from tools.chaos.plan import POINTS, RANKS, Chain, Kill
from tools.chaos.world import SAVE_TOTAL_LIMIT, STEPS, World
from tools.ranks import Outcome, RankServer, RanksFailed
from tools.signals.worker import WORKER, Plan, Trail

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
