"""Check that all ranks share the output folder, since each writes its part of a checkpoint into it."""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path

from alignment.config.errors import OutputError
from alignment.engines.collectives import from_first_rank, gathered
from alignment.run.ranks import rank

PROBE = ".probe-"  # prefix of the probe files
_PATIENCE_S = 10.0  # on network file systems, a new file appears on other hosts when their caches expire
_POLL_S = 0.1
_UNSEEN = "unseen"


def check_shared_folder(folder: Path) -> None:
    """Let every rank look for a file of the first rank and write its own. Collective; leaves nothing behind.

    If ``folder`` does not exist yet, the nearest parent that exists on the first rank is used.

    Raises:
        OutputError: on every rank, naming the hosts that see another folder or cannot write to it.
    """
    name = f"{PROBE}{uuid.uuid4().hex}"
    levels = _existing_level(folder) if rank() == 0 else 0
    places = (folder.absolute(), *folder.absolute().parents)
    problem = _write(places[levels] / name) if rank() == 0 else None
    # Levels rather than a path: a relative path may differ with the working directory of another rank.
    levels, name, problem, first_host = from_first_rank((levels, name, problem, socket.gethostname()))
    probe = places[min(levels, len(places) - 1)] / name
    try:
        if problem is None and rank():
            problem = _look(probe)
        found = gathered((socket.gethostname(), problem))
    finally:
        if rank() == 0:
            probe.unlink(missing_ok=True)
    unseen = sorted({host for host, problem in found if problem == _UNSEEN})
    if unseen:
        raise OutputError(
            f"output_dir: {folder} is node-local: {', '.join(unseen)} does not see the files of {first_host}; "
            "choose a folder on a file system that all nodes share"
        )
    for host, problem in found:
        if problem is not None:
            raise OutputError(
                f"output_dir: {folder} cannot be written on {host}: {problem}; choose another output_dir"
            )


def _existing_level(folder: Path) -> int:
    """The number of levels from ``folder`` up to the nearest existing folder."""
    places = (folder.absolute(), *folder.absolute().parents)
    return next(level for level, place in enumerate(places) if place.exists())


def _write(path: Path) -> str | None:
    """Create a file; return the reason if that fails."""
    try:
        path.write_text("", encoding="utf-8")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _look(probe: Path) -> str | None:
    """Wait for the first rank's file, then create another for a moment; return the problem, if any."""
    deadline = time.monotonic() + _PATIENCE_S
    while not _listed(probe):
        if time.monotonic() > deadline:
            return _UNSEEN
        time.sleep(_POLL_S)
    own = probe.with_name(f"{probe.name}-{rank()}")
    try:
        return _write(own)
    finally:
        own.unlink(missing_ok=True)


def _listed(probe: Path) -> bool:
    """Whether a file exists; listing its folder makes NFS query the server, unlike a lookup by name."""
    try:
        return probe.name in os.listdir(probe.parent)
    except OSError:
        return False
