"""The control groups around this process: the kernel's limits on what it may take of its host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """One control group.

    Attributes:
        folder: where its files are.
        version: 1 or 2, which name them differently.
        path: that of this process's own group, of which this one is a part, as ``/proc/self/cgroup`` gives it.
    """

    folder: Path
    version: int
    path: str


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Each group with a controller, from this process's own to the outermost one that can be seen.

    Args:
        controller: ``cpu`` or ``memory``.
        root: that of files.
    """
    mounts = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, own = (line.split(":", 2) + ["", ""])[:3]
        if not controllers:
            top, version = mounts, 2
        elif controller in controllers.split(","):
            top, version = mounts / controller, 1
        else:
            continue
        # A container may see its own group as the outermost one, and yet be told the path that the host knows.
        parts = Path(own).parts[1:]
        for depth in range(len(parts), -1, -1):
            yield ControlGroup(top.joinpath(*parts[:depth]), version, own)


def text_of(file: Path) -> str:
    """What a file says; empty where it is missing or may not be read."""
    try:
        return file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
