"""The control groups of this process: the kernel's limits on its use of memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ControlGroup(NamedTuple):
    """One control group.

    Attributes:
        folder: folder of its files.
        version: 1 or 2; the file names differ.
    """

    folder: Path
    version: int


def control_groups(root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the groups that limit memory, from this process's own to the outermost visible one.

    Args:
        root: root of the file system.
    """
    mounts = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, controllers, own = (line.split(":", 2) + ["", ""])[:3]
        if not controllers:
            top, version = mounts, 2
        elif "memory" in controllers.split(","):
            top, version = mounts / "memory", 1
        else:
            continue
        # A container may see its own group as the outermost one, although the path is the one on the host.
        parts = Path(own).parts[1:]
        for depth in range(len(parts), -1, -1):
            yield ControlGroup(top.joinpath(*parts[:depth]), version)


def text_of(file: Path) -> str:
    """The content of a file; empty if it is missing or unreadable."""
    try:
        return file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
