"""Turn a process into a rank, with its own session, environment, port, output and ``__main__``."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tools.ranks.job import Job

STACKS = signal.SIGUSR2
COVERAGE = "ALIGNMENT_RANK_COVERAGE"  # a configuration file of coverage.py, to measure the script
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


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


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that it can find and kill them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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
