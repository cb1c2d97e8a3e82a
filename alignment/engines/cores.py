"""The cores of a host, shared among its ranks: the number of threads each uses for work in host memory."""

from __future__ import annotations

import contextlib
import os
import socket

import psutil

from alignment.config.errors import counted
from alignment.engines.collectives import gathered

VARIABLE = "OMP_NUM_THREADS"


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
        return f"threads: {torch.get_num_threads()} per rank ({VARIABLE}={given})"
    if os.environ["LOCAL_WORLD_SIZE"] != "1":  # torch's own number is right for a single rank
        torch.set_num_threads(max(1, cores // ranks))
    shared = f"{counted(cores, 'core')}, {counted(ranks, 'rank')}; set {VARIABLE} to change it"
    return f"threads: {torch.get_num_threads()} per rank for work in host memory ({shared})"


def users_threads() -> str | None:
    """The user's OMP_NUM_THREADS; None if unset, or if torchrun, which this process is a child of, has set it to 1."""
    given = os.environ.get(VARIABLE)
    if given == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(os.getppid()).environ().get(VARIABLE)
    return given
