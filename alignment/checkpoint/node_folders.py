"""Folders that exist on every node: which rank fills them, and a check that all nodes have the same content.

A cache may be on a disk that all nodes share, or each node may have its own. On a shared disk, two writers would do
the same work twice and collide; without one, a node whose cache is not written finds nothing.
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
from alignment.run.ranks import local_rank, rank

_PROBE = ".seen-by-"  # prefix of the probe file
_PATIENCE_S = 2.0  # if a shared disk shows a file later, it is written twice, which only costs time
_POLL_S = 0.1


def fills(folder: Path) -> bool:
    """Whether this rank fills ``folder``: rank 0, and one rank of each node that does not see its files. Collective.

    Args:
        folder: path on this rank's node; created where a rank may have to fill it.
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
    """Whether files become visible; listing the folder makes NFS query the server, unlike a lookup by name."""
    deadline = time.monotonic() + _PATIENCE_S
    while not {*names} <= {*(os.listdir(folder) if folder.is_dir() else ())}:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def check_filled(folder: Path, names: Sequence[str], what: str) -> None:
    """Check that every rank has the first rank's folders. Collective.

    Args:
        folder: path on this rank's node.
        names: folder names of the first rank.
        what: description of the content, for the message.

    Raises:
        DataError: on every rank, naming the hosts without them.
    """
    missing = not _seen(folder, *names)  # another node may have just written them
    found = gathered((socket.gethostname(), str(folder), missing))
    lacking = sorted({f"{host} ({place})" for host, place, lacks in found if lacks})
    if lacking:
        raise DataError(
            f"{what}: the rows that {found[0][0]} prepared are not in the cache of {', '.join(lacking)}; give every "
            "node the same data files and tokenizer, and all ranks of a node the same HF_DATASETS_CACHE"
        )
