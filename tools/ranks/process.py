"""Processes of a job: the ranks, each with its own session, environment, port, output and ``__main__``; their keeper.

The keeper forks the ranks, waits for them, kills those that hang, and leaves no process behind.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import resource
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import psutil

from tools.ranks.job import Job, Outcome, RankOutcome

STACKS = signal.SIGUSR2
COVERAGE = "ALIGNMENT_RANK_COVERAGE"  # a configuration file of coverage.py, to measure the script
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.02
_STACKS_S = 1.0  # time for a rank to write its stacks


def free_port() -> int:
    """Return a port that is currently free. The kernel returns another one for each call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(reached: Callable[[], object], seconds: float, otherwise: Callable[[], str] = str) -> None:
    """Wait until ``reached`` returns a true value; after ``seconds``, raise a TimeoutError that ends with a text."""
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"not reached within {seconds:g} s: {otherwise()}")
        time.sleep(0.05)


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send ``number`` to this process when ``parent``, which forked it, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent exited before the call
        os._exit(1)


def become_rank(job: Job, rank: int, port: int, folder: Path) -> None:
    """Turn a freshly forked process into ``rank`` of ``job``; its output goes to files in ``folder``."""
    os.setsid()
    for descriptor, name in enumerate((os.devnull, f"{rank}.out", f"{rank}.err")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if descriptor else os.O_RDONLY
        opened = os.open(folder / name, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    # Before the keeper kills a rank that hangs, it requests the stacks of all threads for the log.
    faulthandler.register(STACKS, file=2, all_threads=True, chain=False)
    os.environ.clear()
    os.environ.update(job.environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.ranks))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(job.folder)


def run_as_main(job: Job) -> NoReturn:
    """Run the job's script as Python would from a shell, then exit this process with its status."""
    paths = [str(Path(job.script).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in ("", *paths))]
    sys.path_importer_cache.clear()
    sys.argv[:] = [job.script, *job.arguments]
    # Settings that libraries read from the environment at import and that runs change.
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if "HF_DATASETS_CACHE" in os.environ:
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(os.environ["HF_DATASETS_CACHE"])
    if COVERAGE in os.environ:  # written by os._exit, which the configuration patches
        import coverage

        coverage.Coverage(config_file=os.environ[COVERAGE]).start()
    code = 0
    try:
        runpy.run_path(job.script, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # Exit like a multiprocessing child, because Python's normal teardown of thousands of modules takes 0.4 s.
    threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def keep(connection: Connection) -> Job | None:
    """Receive a job from ``connection``, run it and send back its outcome. Returns the job in each forked rank."""
    job: Job = connection.recv()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # to find and kill orphaned descendants
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
