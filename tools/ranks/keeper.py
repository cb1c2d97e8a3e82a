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
    """Receive a job from ``connection``, run it and send back its outcome. Returns the job in each forked rank."""
    job: Job = connection.recv()
    adopt_orphans()
    keeper, port, pids = os.getpid(), free_port(), []
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    for rank in range(job.ranks):
        pid = os.fork()
        if not pid:
            die_with_parent(keeper, signal.SIGKILL)
            connection.close()
            become_rank(job, rank, port, folder)
            return job
        pids.append(pid)
    try:
        ends = _wait(job, pids, connection)
        _kill_descendants()
        texts = [
            [(folder / f"{rank}.{stream}").read_text(errors="replace") for stream in ("out", "err")]
            for rank in range(job.ranks)
        ]
    finally:
        shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # the client has disconnected
        connection.send(Outcome(tuple(RankOutcome(n, *end, *text) for n, (end, text) in enumerate(zip(ends, texts)))))
    return None


def _wait(job: Job, pids: list[int], connection: Connection) -> list[tuple[int, float, str]]:
    """Return exit status, seconds, and the reason of the server's kill for each rank."""
    start = time.monotonic()
    deadline, reason = start + job.timeout, f"did not end within {job.timeout:g} s"
    ends: dict[int, tuple[int, float, str]] = {}
    killed: dict[int, str] = {}
    while len(ends) < len(pids):
        for rank, pid in enumerate(pids):
            done, status = (0, 0) if pid in ends else os.waitpid(pid, os.WNOHANG)
            if done:
                code, now = os.waitstatus_to_exitcode(status), time.monotonic()
                ends[pid] = code, now - start, killed.get(pid, "")
                if code and not killed and now + job.grace < deadline:  # the first failure
                    deadline = now + job.grace
                    reason = f"was still running {job.grace:g} s after rank {rank} had failed"
        left = [pid for pid in pids if pid not in ends]
        late = time.monotonic() > deadline
        # The client sends nothing after the job: a readable connection is a closed one.
        if not killed and (late or connection.poll()):
            killed = {pid: _dump_stacks(pid, reason) for pid in left}
            deadline = time.monotonic() + _STACKS_S
        elif late:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return [ends[pid] for pid in pids]


def _dump_stacks(pid: int, reason: str) -> str:
    """Request a rank to write the stacks of its threads to its log; return why it will be killed."""
    stopped = psutil.Process(pid).status() == psutil.STATUS_STOPPED
    os.kill(pid, STACKS)
    os.kill(pid, signal.SIGCONT)
    return ("was stopped and " if stopped else "") + reason


def _kill_descendants() -> None:
    """Kill all processes that the ranks started and left behind, including daemons."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=_STACKS_S)
