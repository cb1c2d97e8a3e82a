"""Runs chains of kills: start, kill, look, start again, and compare the end with the run that was never killed."""

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
    """One start of a chain and what was found after it.

    Attributes:
        chain, method: which.
        number: of the start, from 1.
        kill: as planned, in words; "" for the last start.
        point: where, by name; "random" for a moment, "" for none.
        place: the phase that the killed rank was in.
        killed: whether it came to pass; otherwise the run had finished before.
        resumed_from: step of the newest checkpoint at the start; 0: none.
        seconds: that it took.
        problems: what the judge found.
        report: the ranks' output, where there are problems.
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
    """The run of a method that is never killed: its folder, and how long it takes to the first step and in all."""

    folder: Path
    start_s: float
    seconds: float

    def expected(self, step: int) -> float:
        """Seconds that a run takes from the checkpoint of a step to its end."""
        return self.start_s + (self.seconds - self.start_s) * (1 - step / STEPS)

    def corrected(self, step: int, end: End) -> Reference:
        """The times between these and those of a run that was just left alone: the machine's load changes."""
        ratio = (1 + end.seconds / self.expected(step)) / 2
        return dataclasses.replace(self, start_s=self.start_s * ratio, seconds=self.seconds * ratio)


@dataclass
class _State:
    """A chain between two starts: its folder, what was found in it last, and its resumes."""

    output_dir: Path
    found: Look = field(default_factory=Look)
    lineage: Lineage = field(default_factory=Lineage)


class Chaos:
    """Chains of kills in a folder.

    Args:
        server: forks the ranks.
        folder: for the world, references and runs; on a fast disk.
        failed: where the output folders of failed chains are kept; None: nowhere.
    """

    def __init__(self, server: RankServer, folder: Path, failed: Path | None = None) -> None:
        self.server, self.folder, self.failed = server, folder, failed
        self.world = World.made(folder / "world")
        self._references: dict[str, Reference] = {}
        self._making = threading.Lock()

    def reference(self, method: str) -> Reference:
        """The run that is never killed, made when it is first needed.

        Raises:
            RuntimeError: it failed.
        """
        with self._making:
            if method not in self._references:
                assert self.server.address  # it is running, so that only the run is timed
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
        """Run a chain to its end, or to the first problem; ``note`` is told of each attempt."""
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
        """Start once, and judge."""
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
    """What is wrong with how the ranks ended."""
    problems = [f"rank {rank} did not end by itself" for rank in end.hung]
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


def as_json(attempted: Attempted) -> dict[str, object]:
    """For the record."""
    return dataclasses.asdict(attempted)
