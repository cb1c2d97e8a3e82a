"""Run chains of kills: start, kill, check, restart, and compare the result with a run that was never killed."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tools.chaos.attempt import Attempt, End
from tools.chaos.judge import Lineage, Look, compare, look, lost
from tools.chaos.plan import Chain, Kill
from tools.chaos.world import SAVE_TOTAL_LIMIT, STEPS, World
from tools.ranks import RankServer

Note = Callable[["Attempted"], None]


@dataclass(frozen=True)
class Attempted:
    """One attempt of a chain and its result.

    Attributes:
        chain, method: name of the chain and its method.
        number: number of the attempt, from 1.
        kill: description of the planned kill; "" for the last attempt.
        point: name of the point; "random" for a random moment, "" for no kill.
        place: phase of the killed rank.
        killed: whether the kill happened; otherwise the run had already finished.
        resumed_from: step of the newest checkpoint at the start; 0 for none.
        seconds: duration.
        problems: problems found.
        report: output of the ranks if there are problems.
    """

    chain: str
    method: str
    number: int
    kill: str
    point: str
    place: str
    killed: bool
    resumed_from: int
    seconds: float
    problems: tuple[str, ...]
    report: str = ""


@dataclass(frozen=True)
class Reference:
    """The run of a method that is never killed: its folder, the time to its first step and its total time."""

    folder: Path
    start_s: float
    seconds: float

    def expected(self, step: int) -> float:
        """Return the expected seconds from the checkpoint of a step to the end of the run."""
        return self.start_s + (self.seconds - self.start_s) * (1 - step / STEPS)

    def corrected(self, step: int, end: End) -> Reference:
        """Return times averaged with those of a recent undisturbed attempt, because the machine's load changes."""
        ratio = (1 + end.seconds / self.expected(step)) / 2
        return dataclasses.replace(self, start_s=self.start_s * ratio, seconds=self.seconds * ratio)


@dataclass
class _State:
    """The state of a chain between two attempts: its folder, the last check, and its resumes."""

    output_dir: Path
    found: Look = field(default_factory=Look)
    lineage: Lineage = field(default_factory=Lineage)


class Chaos:
    """Chains of kills in a folder.

    Args:
        server: the server that forks the ranks.
        folder: folder for the world, references and runs; on a fast disk.
        failed: folder to which output folders of failed chains are moved; None to delete them.
    """

    def __init__(self, server: RankServer, folder: Path, failed: Path | None = None) -> None:
        self.server, self.folder, self.failed = server, folder, failed
        self.world = World.made(folder / "world")
        self._references: dict[str, Reference] = {}
        self._making = threading.Lock()

    def reference(self, method: str) -> Reference:
        """Return the run that is never killed, which is made on first use.

        Raises:
            RuntimeError: the run failed.
        """
        with self._making:
            if method not in self._references:
                assert self.server.address  # start the server first, so that only the run is timed
                output_dir = self.folder / f"{method}-reference"
                end = self._start(f"{method}-reference", method, output_dir, None, 0.0)
                if end.code:
                    raise RuntimeError(f"the {method} run that is never killed failed: {end.report}")
                self._references[method] = Reference(output_dir, end.trained_from, end.seconds)
            return self._references[method]

    def _start(self, name: str, method: str, output_dir: Path, kill: Kill | None, expected: float) -> End:
        arguments = self.world.arguments(method, output_dir)
        return Attempt(self.server, self.folder / f"{name}-ranks").run(arguments, output_dir, kill, expected)

    def run(self, chain: Chain, note: Note = lambda attempted: None) -> list[Attempted]:
        """Run a chain to its end, or to the first problem; ``note`` is called with each attempt."""
        told: list[Attempted] = []
        state = _State(self.folder / f"chain-{chain.name}")
        for number, kill in enumerate([*chain.kills, None], 1):
            end = self._attempt(chain, number, kill, state, told)
            note(told[-1])
            if end.code == 0 or told[-1].problems:
                break
        self._put_away(chain, state.output_dir, bool(told[-1].problems))
        return told

    def _attempt(self, chain: Chain, number: int, kill: Kill | None, state: _State, told: list[Attempted]) -> End:
        """Make and check one attempt."""
        reference, before = self.reference(chain.method), state.found
        newest = max(before.steps, default=0)
        end = self._start(
            f"chain-{chain.name}", chain.method, state.output_dir, kill, expected=reference.expected(newest)
        )
        state.found = look(state.output_dir)
        resumes = state.lineage.attempt(before, state.found)
        problems = [*_problems(end, kill), *state.found.problems, *lost(before, state.found, SAVE_TOTAL_LIMIT)]
        if end.code == 0:
            problems += compare(state.output_dir, reference.folder, resumes)
            self._references[chain.method] = reference.corrected(newest, end)
        told.append(_attempted(chain, number, kill, end, before, problems))
        return end

    def _put_away(self, chain: Chain, output_dir: Path, failed: bool) -> None:
        if failed and self.failed is not None:
            shutil.rmtree(self.failed / chain.name, ignore_errors=True)
            shutil.copytree(output_dir, self.failed / chain.name)
        shutil.rmtree(output_dir, ignore_errors=True)


def _problems(end: End, kill: Kill | None) -> list[str]:
    """Return the problems with the ends of the ranks."""
    problems = [f"rank {rank} did not exit by itself" for rank in end.hung]
    if end.code and not end.killed:
        problems.append(f"exit status {end.code} without a kill")
    return problems


def _attempted(chain: Chain, number: int, kill: Kill | None, end: End, before: Look, problems: list[str]) -> Attempted:
    point = "" if kill is None else kill.point or "random"
    return Attempted(
        chain=chain.name,
        method=chain.method,
        number=number,
        kill="" if kill is None else str(kill),
        point=point,
        place=end.place if end.killed else "",
        killed=end.killed,
        resumed_from=max(before.steps, default=0),
        seconds=round(end.seconds, 2),
        problems=tuple(problems),
        report=end.report if problems else "",
    )
