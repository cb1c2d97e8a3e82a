"""Which rank this process is, and of how many."""

from __future__ import annotations

import os
import sys


def rank() -> int:
    """The rank of this process, 0 without a launcher."""
    return _of_group("get_rank", "RANK", 0)


def local_rank() -> int:
    """The rank of this process among those of its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """The number of processes of this run."""
    return _of_group("get_world_size", "WORLD_SIZE", 1)


def _of_group(function: str, variable: str, default: int) -> int:
    """Ask the process group, or the environment before the ranks have joined."""
    distributed = sys.modules.get("torch.distributed")
    if getattr(distributed, "is_initialized", bool)():  # missing while another thread is importing the module
        return int(getattr(distributed, function)())
    return int(os.environ.get(variable, default))
