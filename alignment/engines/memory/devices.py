"""Free and total memory of a GPU within this process's limit, or of the host."""

from __future__ import annotations

import os

import psutil
import torch


def free_bytes(where: torch.device) -> int:
    """The memory that this rank can still allocate: on a GPU, or its share of the host.

    On a GPU this is the free memory plus what torch has reserved but not used, limited by
    ``torch.cuda.set_per_process_memory_fraction``, which the driver is not aware of.
    """
    if where.type != "cuda":
        return int(psutil.virtual_memory().available) // _ranks_of_host()
    free, _ = torch.cuda.mem_get_info(where)
    taken = torch.cuda.memory_allocated(where)
    unused = torch.cuda.memory_reserved(where) - taken
    return max(0, min(free + unused, total_bytes(where) - taken))


def total_bytes(where: torch.device) -> int:
    """The total memory that this rank can use: of a GPU, or its share of the host."""
    if where.type != "cuda":
        return int(psutil.virtual_memory().total) // _ranks_of_host()
    _, total = torch.cuda.mem_get_info(where)
    return int(total * torch.cuda.get_per_process_memory_fraction(where))


def _ranks_of_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
