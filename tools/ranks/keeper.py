"""The keeper of one job: fork its ranks, wait for them, kill those that hang, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from tools.ranks.job import Job, Outcome, RankOutcome
from tools.ranks.process import STACKS, adopt_orphans, become_rank, die_with_parent, free_port

_POLL_S = 0.02
_STACKS_S = 1.0  # time for a rank to write its stacks


def keep(connection: Connection) -> Job | None:
    """Receive a job from ``connection``, run it and send back its outcome.

    Returns:
        None in the keeper, which is then finished; the job in each forked rank.
    """
    job: Job = connection.recv()
    adopt_orphans()
    keeper, port = os.getpid(), free_port()
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    pids: list[int] = []
    for rank in range(job.ranks):
        pid = os.fork()
        if not pid:
            die_with_parent(keeper, signal.SIGKILL)
            connection.close()
            become_rank(job, rank, port, folder)
            return job
        pids.append(pid)
    try:
        ranks = _Watch(job, pids, connection).wait()
        _kill_descendants()
        outcome = Outcome(tuple(_with_output(rank, folder) for rank in ranks))
    finally:
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # the client has disconnected
        connection.send(outcome)
    return None


class _Watch:
    """Waits for the ranks of a job."""

    def __init__(self, job: Job, pids: list[int], connection: Connection) -> None:
        self.job, self.pids, self.connection = job, pids, connection
        self.start = time.monotonic()
        self.deadline, self.reason = self.start + job.timeout, f"did not end within {job.timeout:g} s"
        self.ends: dict[int, RankOutcome] = {}
        self.killed: dict[int, str] = {}

    def wait(self) -> list[RankOutcome]:
        """Return the outcome of every rank in order, without output."""
        while len(self.ends) < len(self.pids):
            self._reap()
            late = time.monotonic() > self.deadline
            if not self.killed and (late or _is_closed(self.connection)):
                self._give_up()
            elif late:
                for pid in self._left():
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_S)
        return [self.ends[pid] for pid in self.pids]

    def _left(self) -> list[int]:
        return [pid for pid in self.pids if pid not in self.ends]

    def _reap(self) -> None:
        """Record ranks that have exited. The first failure starts the grace period of the others."""
        for pid in self._left():
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            rank, code, now = self.pids.index(pid), os.waitstatus_to_exitcode(status), time.monotonic()
            self.ends[pid] = RankOutcome(rank, code, now - self.start, self.killed.get(pid, ""), "", "")
            if code and not self.killed and now + self.job.grace < self.deadline:
                self.deadline = now + self.job.grace
                self.reason = f"was still running {self.job.grace:g} s after rank {rank} had failed"

    def _give_up(self) -> None:
        """Request all remaining ranks to write the stacks of their threads to their logs before they are killed."""
        for pid in self._left():
            stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
            self.killed[pid] = ("was stopped and " if stopped else "") + self.reason
            os.kill(pid, STACKS)
            os.kill(pid, signal.SIGCONT)
        self.deadline = time.monotonic() + _STACKS_S


def _is_closed(connection: Connection) -> bool:
    """Return whether the client has disconnected. It sends nothing after the job, so readable means closed."""
    return connection.poll()


def _kill_descendants() -> None:
    """Kill all processes that the ranks started and left behind, including daemons."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=_STACKS_S)


def _with_output(rank: RankOutcome, folder: Path) -> RankOutcome:
    texts = [(folder / f"{rank.rank}.{stream}").read_text(errors="replace") for stream in ("out", "err")]
    return RankOutcome(rank.rank, rank.code, rank.seconds, rank.ended, *texts)
