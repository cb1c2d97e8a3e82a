"""The request to the server and its response, which are pickled between processes of the same checkout."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

_LOG_LINES = 40


@dataclass(frozen=True)
class Job:
    """A script to run on several ranks; see :meth:`tools.ranks.client.RankServer.run`."""

    script: str
    arguments: tuple[str, ...]
    ranks: int
    environment: Mapping[str, str]
    folder: str
    timeout: float
    grace: float


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended."""

    rank: int
    code: int  # exit status, or the negative number of the signal that killed it
    seconds: float  # from the start of the job to the end of the rank
    ended: str  # why the server killed it; "" if it exited by itself
    stdout: str
    stderr: str  # with the stacks of a rank that hung

    def describe(self) -> str:
        """Return one line such as ``rank 1 was killed by SIGKILL after 3.2 s``."""
        if self.ended:
            return f"rank {self.rank} {self.ended} and was killed"
        killed = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else ""
        how = killed or f"exited with status {self.code}"
        return f"rank {self.rank} {how} after {self.seconds:.1f} s"


@dataclass(frozen=True)
class Outcome:
    """How a job ended, by rank."""

    ranks: tuple[RankOutcome, ...]

    def _failures_first(self) -> list[RankOutcome]:
        return sorted(self.ranks, key=lambda rank: (not (rank.code or rank.ended), bool(rank.ended), rank.seconds))

    @property
    def returncode(self) -> int:
        """The exit status of the rank that failed first; 0 if none failed."""
        return self._failures_first()[0].code

    @property
    def hung(self) -> tuple[int, ...]:
        """The ranks that the server had to kill."""
        return tuple(rank.rank for rank in self.ranks if rank.ended)

    @property
    def stdout(self) -> str:
        """The output of all ranks, in order."""
        return "".join(rank.stdout for rank in self.ranks)

    @property
    def stderr(self) -> str:
        """The output of all ranks, in order."""
        return "".join(rank.stderr for rank in self.ranks)

    def report(self) -> str:
        """Return how each rank ended and the end of its log, starting with the first failure."""
        lines = ["; ".join(rank.describe() for rank in self._failures_first())]
        for rank in self._failures_first():
            lines.append(f"--- rank {rank.rank} ---")
            lines += [*rank.stdout.splitlines(), *rank.stderr.splitlines()][-_LOG_LINES:]
        return "\n".join(lines)
