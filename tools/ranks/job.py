"""The request to the server and its response, which are pickled between processes of the same checkout."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

_LOG_LINES = 40


@dataclass(frozen=True)
class Job:
    """A script to run on several ranks.

    Attributes:
        script: path of the script, run as ``__main__``.
        arguments: its ``sys.argv[1:]``.
        ranks: number of processes.
        environment: the complete environment of each rank, to which the launcher's variables are added.
        folder: working directory.
        timeout: seconds after which the ranks are killed.
        grace: seconds for the other ranks to exit by themselves after one has failed.
    """

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = "."
    timeout: float = 120.0
    grace: float = 15.0


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: the rank.
        code: exit status, or the negative number of the signal that killed it.
        seconds: time from the start of the job to the end of the rank.
        ended: why it was killed; ``""`` if it exited by itself.
        stdout: its standard output.
        stderr: its standard error, including the stacks of a rank that hung.
    """

    rank: int
    code: int
    seconds: float
    ended: str
    stdout: str
    stderr: str

    def describe(self) -> str:
        """Return one line such as ``rank 1 was killed by SIGKILL after 3.2 s``."""
        if self.ended:
            return f"rank {self.rank} {self.ended} and was killed"
        if self.code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.code).name} after {self.seconds:.1f} s"
        return f"rank {self.rank} exited with status {self.code} after {self.seconds:.1f} s"


@dataclass(frozen=True)
class Outcome:
    """How a job ended. ``ranks`` is ordered by rank; ``returncode`` is 0 if all ranks succeeded."""

    ranks: tuple[RankOutcome, ...]

    @property
    def returncode(self) -> int:
        """The exit status of the rank that failed first; 0 if none failed."""
        failed = [rank for rank in self.ranks if rank.code]
        return min(failed, key=lambda rank: (bool(rank.ended), rank.seconds)).code if failed else 0

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
        order = sorted(self.ranks, key=lambda rank: (not (rank.code or rank.ended), bool(rank.ended), rank.seconds))
        lines = ["; ".join(rank.describe() for rank in order)]
        for rank in order:
            lines.append(f"--- rank {rank.rank} ---")
            lines += [*rank.stdout.splitlines(), *rank.stderr.splitlines()][-_LOG_LINES:]
        return "\n".join(lines)
