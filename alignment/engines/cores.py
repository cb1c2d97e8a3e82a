"""The cores of a host, divided among its ranks: how many threads each takes for work in host memory.

That work is an optimizer or weights in host memory, or training on CPUs. torchrun gives each rank one thread, the
deepspeed launcher all cores to every rank: the first leaves most of the host idle, the second is many times slower.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from alignment.engines.memory.control_groups import control_groups, text_of
from alignment.engines.watch.launchers import launchers

VARIABLE = "OMP_NUM_THREADS"
# These set the variable to 1 where the user has not; deepspeed sets it where --bind_cores_to_rank asks for that.
_SETTING = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "run.py",
    "accelerate",
    "accelerate-launch",
)


class Cores(NamedTuple):
    """What a rank may run on.

    Attributes:
        host: its name.
        allowed: the numbers of the cores.
        group: the control group, whose quota its ranks share.
        quota: cores' worth of time that the group may use; None for no limit.
    """

    host: str
    allowed: frozenset[int]
    group: str = ""
    quota: float | None = None


def own_cores() -> Cores:
    """Those of this process, by its affinity and the quota of its control group."""
    if hasattr(os, "sched_getaffinity"):
        allowed = frozenset(os.sched_getaffinity(0))
    else:
        allowed = frozenset(range(os.cpu_count() or 1))
    group, quota = cpu_quota()
    return Cores(socket.gethostname(), allowed, group, quota)


def share(everyone: Sequence[Cores], rank: int) -> int:
    """Threads of a rank: a core that several may run on is divided among them, a quota among the ranks of its group.

    Where a launcher has bound every rank to cores of its own, these are not divided once more.
    """
    own = everyone[rank]
    here = [each for each in everyone if each.host == own.host]
    users = Counter(core for each in here for core in each.allowed)
    cores = sum(1 / users[core] for core in own.allowed)
    if own.quota is not None:
        cores = min(cores, own.quota / sum(each.group == own.group for each in here))
    return max(1, int(cores + 1e-6))


def cpu_quota(root: Path = Path("/")) -> tuple[str, float | None]:
    """This process's control group, and the cores' worth of time that it and those above it allow.

    Args:
        root: that of files.
    """
    groups = list(control_groups("cpu", root))
    limits = [limit for group in groups for limit in _limit(group.folder)]
    return groups[0].path if groups else "", min(limits, default=None)


def _limit(folder: Path) -> list[float]:
    """The limit of one control group; empty for none."""
    words = text_of(folder / "cpu.max").split() or [
        text_of(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or "0" in words:  # "max", -1, or not there
        return []
    return [int(words[0]) / int(words[1])]


def users_threads() -> str | None:
    """The user's own OMP_NUM_THREADS; None where there is none, or a launcher has set it to 1 by itself.

    It changes its own environment to do so: the one that it was started with does not have the variable.
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
    """Take this rank's share of the host's cores for torch's threads; collective, once the ranks have joined.

    Returns:
        A sentence for the log.
    """
    import torch

    own = own_cores()
    everyone: list[Any] = [own]
    given = users_threads()
    if torch.distributed.get_world_size() > 1:
        everyone = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, own)
    rank = torch.distributed.get_rank()
    if given is not None:
        return f"threads: {torch.get_num_threads()} per rank, as {VARIABLE}={given} says"
    here = sum(each.host == own.host for each in everyone)
    threads = share(everyone, rank)
    if here > 1 or own.quota is not None:
        torch.set_num_threads(threads)
    limit = "" if own.quota is None else f", of which a quota allows {own.quota:g}"
    return (
        f"threads: {torch.get_num_threads()} per rank for work in host memory ({len(own.allowed)} cores{limit}, "
        f"{here} rank(s) on this host); {VARIABLE} sets another number"
    )
