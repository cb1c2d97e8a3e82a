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

    cores = sorted(os.sched_getaffinity(0))
    ranks = gathered((socket.gethostname(), cores)).count((socket.gethostname(), cores))
    given = users_threads()
    if given is not None:
        return f"threads: {torch.get_num_threads()} per rank ({VARIABLE}={given})"
    torch.set_num_threads(max(1, len(cores) // ranks))
    shared = f"{counted(len(cores), 'core')}, {counted(ranks, 'rank')}"
    return (
        f"threads: {torch.get_num_threads()} per rank for work in host memory ({shared}); set {VARIABLE} to change it"
    )


def users_threads() -> str | None:
    """The user's OMP_NUM_THREADS; None if unset, or if torchrun, which this process is a child of, has set it to 1."""
    given = os.environ.get(VARIABLE)
    if given == "1" and "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(os.getppid()).environ().get(VARIABLE)
    return given
