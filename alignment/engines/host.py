"""What the processes of a host share: its cores, and the folder in which DeepSpeed compiles extensions."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from alignment.config.errors import counted
from alignment.engines.collectives import gathered
from alignment.run.ranks import local_rank

THREADS = "OMP_NUM_THREADS"
EXTENSIONS = "TORCH_EXTENSIONS_DIR"
_TELL_S = 60.0  # seconds after which a lock is reported


def share_cores() -> str:
    """Split the cores that this rank may use among the ranks of its host that use the same. Collective.

    Without this, the deepspeed launcher gives all cores to every rank, which is many times slower, and torchrun one.

    Returns:
        A line for the log.
    """
    import torch

    own = socket.gethostname(), sorted(os.sched_getaffinity(0))
    ranks, cores, given = gathered(own).count(own), len(own[1]), users_threads()
    if given is not None:
        return f"threads: {torch.get_num_threads()} per rank ({THREADS}={given})"
    if os.environ["LOCAL_WORLD_SIZE"] != "1":  # torch's own number is right for a single rank
        torch.set_num_threads(max(1, cores // ranks))
    shared = f"{counted(cores, 'core')}, {counted(ranks, 'rank')}; set {THREADS} to change it"
    return f"threads: {torch.get_num_threads()} per rank for work in host memory ({shared})"


def users_threads() -> str | None:
    """The user's OMP_NUM_THREADS; None if unset, or if torchrun, which this process is a child of, has set it to 1."""
    given = os.environ.get(THREADS)
    if given == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(os.getppid()).environ().get(THREADS)
    return given


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Within this context, extensions are compiled in a folder of this host, and a lock that remains is reported.

    With several hosts, torch's own folder may be on a disk that they share.
    """
    from torch.utils.cpp_extension import get_default_build_root

    if EXTENSIONS not in os.environ and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):
        os.environ[EXTENSIONS] = f"{get_default_build_root()}/{socket.gethostname()}-{sys.implementation.cache_tag}"
    timer = threading.Timer(_TELL_S, _report, [Path(os.environ.get(EXTENSIONS) or get_default_build_root())])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report(folder: Path) -> None:
    # torch creates this file, and waits without a limit for it to vanish.
    for lock in folder.rglob("lock") if local_rank() == 0 else ():
        text = f"waiting for an extension that is compiled in {lock.parent}; if no process is compiling, a killed one"
        print(f"{text} has left {lock}: remove this file and start again", file=sys.stderr, flush=True)
