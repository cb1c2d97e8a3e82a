"""The cores of a host, shared among its ranks: the number of threads each uses for work in host memory.

This applies to an optimizer or weights in host memory, and to training on CPUs. torchrun gives each rank one thread;
the deepspeed launcher gives all cores to every rank. The former leaves most of the host idle, the latter is many times
slower.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from alignment.config.errors import counted
from alignment.engines.collectives import gathered
from alignment.engines.memory.control_groups import control_groups, text_of
from alignment.run.launchers import launchers

VARIABLE = "OMP_NUM_THREADS"
# These set the variable to 1 unless the user has set it; deepspeed sets it only with --bind_cores_to_rank.
_SETTING = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "run.py",
    "accelerate",
    "accelerate-launch",
)


class Cores(NamedTuple):
    """The CPU cores available to a rank.

    Attributes:
        host: host name.
        allowed: core numbers.
        group: control group, whose quota its ranks share.
        quota: CPU quota of the group in cores; None if unlimited.
    """

    host: str
    allowed: frozenset[int]
    group: str = ""
    quota: float | None = None


def own_cores() -> Cores:
    """The cores of this process, from its affinity and the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        allowed = frozenset(os.sched_getaffinity(0))
    else:
        allowed = frozenset(range(os.cpu_count() or 1))
    group, quota = cpu_quota()
    return Cores(socket.gethostname(), allowed, group, quota)


def share(everyone: Sequence[Cores], rank: int) -> int:
    """The number of threads of a rank: shared cores are split among their ranks, a quota among those of its group.

    If a launcher has bound every rank to separate cores, these are not split again.
    """
    own = everyone[rank]
    here = [each for each in everyone if each.host == own.host]
    users = Counter(core for each in here for core in each.allowed)
    cores = sum(1 / users[core] for core in own.allowed)
    if own.quota is not None:
        cores = min(cores, own.quota / sum(each.group == own.group for each in here))
    return max(1, int(cores + 1e-6))


def cpu_quota(root: Path = Path("/")) -> tuple[str, float | None]:
    """This process's control group, and the smallest CPU quota of it and its parents, in cores.

    Args:
        root: root of the file system.
    """
    groups = list(control_groups("cpu", root))
    limits = [limit for group in groups for limit in _limit(group.folder)]
    return groups[0].path if groups else "", min(limits, default=None)


def _limit(folder: Path) -> list[float]:
    """The quota of one control group, as a list that is empty if there is none."""
    words = text_of(folder / "cpu.max").split() or [
        text_of(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or "0" in words:  # "max", -1, or missing
        return []
    return [int(words[0]) / int(words[1])]


def users_threads() -> str | None:
    """The user's own OMP_NUM_THREADS; None if unset, or if a launcher has set it to 1.

    A launcher does so by changing its own environment; the one that it was started with does not have the variable.
    """
    given = os.environ.get(VARIABLE)
    if given != "1" or os.environ.get("LOCAL_WORLD_SIZE") == "1":
        return given
    for launcher in launchers():
        if launcher.name in _SETTING:
            with contextlib.suppress(psutil.Error):
                return psutil.Process(launcher.pid).environ().get(VARIABLE)
    return given


def share_cores() -> str:
    """Set torch's number of threads to this rank's share of the host's cores. Collective; the ranks must have joined.

    Returns:
        A line for the log.
    """
    import torch

    own = own_cores()
    everyone, given = gathered(own), users_threads()
    rank = torch.distributed.get_rank()
    if given is not None:
        return f"threads: {torch.get_num_threads()} per rank ({VARIABLE}={given})"
    here = sum(each.host == own.host for each in everyone)
    threads = share(everyone, rank)
    if here > 1 or own.quota is not None:
        torch.set_num_threads(threads)
    limit = "" if own.quota is None else f", limited to {own.quota:g} by a quota"
    return (
        f"threads: {torch.get_num_threads()} per rank for work in host memory ({len(own.allowed)} cores{limit}, "
        f"{counted(here, 'rank')} on this host); set {VARIABLE} to change it"
    )
