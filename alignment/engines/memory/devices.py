"""Free memory: of a GPU within this process's limit, and of the host within its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from alignment.engines.memory.control_groups import control_groups, text_of


class _Files(NamedTuple):
    """File names of a version of control groups: limit, usage, and the reclaimable entry of ``memory.stat``."""

    limit: str
    usage: str
    freeable: str


_FILES = {
    1: _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Files("memory.max", "memory.current", "inactive_file"),
}


def free_host_bytes(root: Path = Path("/")) -> int:
    """The minimum of the host's free memory and what its control groups have left; ``root`` is that of files."""
    return max(0, min([int(psutil.virtual_memory().available), *_left(root)]))


def total_host_bytes(root: Path = Path("/")) -> int:
    """The host's memory, or the lowest limit of this process's control groups."""
    limits = (_number(folder / files.limit) for folder, files in _folders(root))
    return min([int(psutil.virtual_memory().total), *(limit for limit in limits if limit is not None)])


def _left(root: Path) -> Iterator[int]:
    """Yield the remaining memory of every control group of this process that has a limit."""
    for folder, files in _folders(root):
        limit, usage = (_number(folder / name) for name in (files.limit, files.usage))
        if limit is not None and usage is not None:
            # The kernel drops cached files before an allocation fails.
            yield limit - usage + _freeable(folder, files)


def _folders(root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield each memory control group with its file names."""
    for group in control_groups(root):
        yield group.folder, _FILES[group.version]


def _freeable(folder: Path, files: _Files) -> int:
    for line in text_of(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == files.freeable and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def free_bytes(where: torch.device) -> int:
    """The memory that this rank can still allocate: on a GPU, or its share of the host.

    On a GPU this is the free memory plus what torch has reserved but not used, limited by
    ``torch.cuda.set_per_process_memory_fraction``, which the driver is not aware of.
    """
    if where.type != "cuda":
        return free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free, _ = torch.cuda.mem_get_info(where)
    taken = torch.cuda.memory_allocated(where)
    unused = torch.cuda.memory_reserved(where) - taken
    return max(0, min(free + unused, total_bytes(where) - taken))


def total_bytes(where: torch.device) -> int:
    """The total memory that this rank can use: of a GPU, or its share of the host within its control groups."""
    if where.type != "cuda":
        return total_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    _, total = torch.cuda.mem_get_info(where)
    return int(total * torch.cuda.get_per_process_memory_fraction(where))
