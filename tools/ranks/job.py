"""What the server is asked to run, and what it answers. Both travel as pickles between processes of one checkout."""

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
        environment: the whole environment of each rank; the launcher's variables are added to it.
        folder: working directory.
        timeout: seconds until every rank must have ended.
        grace: seconds that the other ranks have to end by themselves after one has failed.
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
        rank: its number.
        code: exit status, or minus the number of the signal that ended it.
        seconds: from the start of the job to its end.
        ended: why it was killed; ``""`` if it ended by itself.
        stdout: what it wrote.
        stderr: what it wrote, stacks of a rank that hung included.
    """

    rank: int
    code: int
    seconds: float
    ended: str
    stdout: str
    stderr: str

    def describe(self) -> str:
        """One line: ``rank 1 was killed by SIGKILL after 3.2 s``."""
        if self.ended:
            return f"rank {self.rank} {self.ended} and was killed"
        if self.code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.code).name} after {self.seconds:.1f} s"
        return f"rank {self.rank} exited with status {self.code} after {self.seconds:.1f} s"


@dataclass(frozen=True)
class Outcome:
    """How a job ended. ``ranks`` are in the order of their numbers; ``returncode`` is 0 if all of them succeeded."""

    ranks: tuple[RankOutcome, ...]

    @property
    def returncode(self) -> int:
        """The code of the first rank that failed, in time; 0 if none did."""
        failed = [rank for rank in self.ranks if rank.code]
        return min(failed, key=lambda rank: (bool(rank.ended), rank.seconds)).code if failed else 0

    @property
    def hung(self) -> tuple[int, ...]:
        """The ranks that the server had to kill."""
        return tuple(rank.rank for rank in self.ranks if rank.ended)

    @property
    def stdout(self) -> str:
        """What all ranks wrote, rank after rank."""
        return "".join(rank.stdout for rank in self.ranks)

    @property
    def stderr(self) -> str:
        """What all ranks wrote, rank after rank."""
        return "".join(rank.stderr for rank in self.ranks)

    def report(self) -> str:
        """How each rank ended and the end of its log, the first failure first."""
        order = sorted(self.ranks, key=lambda rank: (not (rank.code or rank.ended), bool(rank.ended), rank.seconds))
        lines = ["; ".join(rank.describe() for rank in order)]
        for rank in order:
            lines.append(f"--- rank {rank.rank} ---")
            lines += [*rank.stdout.splitlines(), *rank.stderr.splitlines()][-_LOG_LINES:]
        return "\n".join(lines)
