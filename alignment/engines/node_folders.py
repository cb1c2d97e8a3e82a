"""Folders that every node has, under one name or another: who fills them, and whether all have the same in them.

A cache may lie on a disk that all nodes share, or each node may have one of its own. On a shared disk two writers
would do the same work twice and meet; without one, a node that nobody writes for finds nothing.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from alignment.config.errors import DataError
from alignment.engines.collectives import barrier, from_first_rank, gathered
from alignment.engines.launch_env import local_rank, rank

_PROBE = ".seen-by-"  # what the name of its file begins with
_PATIENCE_S = 2.0  # a shared disk that shows a file later is written twice, which costs time and no more
_POLL_S = 0.1


def fills(folder: Path) -> bool:
    """Whether this rank fills ``folder``: the first one, and of each node that does not see its files one; collective.

    Args:
        folder: on this rank's node; made where a rank may have to fill it.
    """
    may = local_rank() == 0
    if may:
        folder.mkdir(parents=True, exist_ok=True)
    probe = tempfile.NamedTemporaryFile(prefix=_PROBE, dir=folder) if rank() == 0 else None  # noqa: SIM115
    try:
        name = from_first_rank(None if probe is None else Path(probe.name).name)
        alone = may and (rank() == 0 or not _seen(folder, name))
        barrier()
    finally:
        if probe is not None:
            probe.close()
    return alone


def _seen(folder: Path, *names: str) -> bool:
    """Whether files show up; listing their folder makes NFS ask the server, where a look at a name may not."""
    deadline = time.monotonic() + _PATIENCE_S
    while not {*names} <= {*(os.listdir(folder) if folder.is_dir() else ())}:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def check_filled(folder: Path, names: Sequence[str], what: str) -> None:
    """Look whether every rank has the first rank's folders; collective.

    Args:
        folder: on this rank's node.
        names: in it, of the first rank.
        what: is in them, for the message.

    Raises:
        DataError: on every rank, naming the hosts that lack one.
    """
    missing = not _seen(folder, *names)  # another node may have written them a moment ago
    found = gathered((socket.gethostname(), str(folder), missing))
    lacking = sorted({f"{host} ({place})" for host, place, lacks in found if lacks})
    if lacking:
        raise DataError(
            f"{what}: {found[0][0]} has prepared rows that are not in the cache of {', '.join(lacking)}; give every "
            "node the same data files and tokenizer, and all ranks of a node the same HF_DATASETS_CACHE"
        )
