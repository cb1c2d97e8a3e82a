"""Memory of a device: what is free for this process, and how torch allocates it."""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING

import psutil

from alignment.internals.torch import allocator_settings, set_allocator_settings

if TYPE_CHECKING:
    import torch


# The last two are older names that torch still reads.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
# Larger page-locked blocks are neither rounded up to a power of two nor kept when they are freed. Smaller ones are, so
# that the buffers of batches are reused. Older releases reject the key.
_PINNED, _PINNED_SINCE = "pinned_max_cached_size_mb:8", (2, 13)


def free_bytes(where: torch.device) -> int:
    """The memory that this rank can still allocate: on a GPU, or its share of the host.

    On a GPU this is the free memory plus what torch has reserved but not used, limited by
    ``torch.cuda.set_per_process_memory_fraction``, which the driver is not aware of.
    """
    import torch

    if where.type != "cuda":
        return int(psutil.virtual_memory().available) // ranks_of_host()
    free, _ = torch.cuda.mem_get_info(where)
    taken = torch.cuda.memory_allocated(where)
    unused = torch.cuda.memory_reserved(where) - taken
    return max(0, min(free + unused, total_bytes(where) - taken))


def total_bytes(where: torch.device) -> int:
    """The total memory that this rank can use: of a GPU, or its share of the host."""
    import torch

    if where.type != "cuda":
        return int(psutil.virtual_memory().total) // ranks_of_host()
    _, total = torch.cuda.mem_get_info(where)
    return int(total * torch.cuda.get_per_process_memory_fraction(where))


def ranks_of_host() -> int:
    """The number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def page_locked(size: float) -> int:
    """The bytes that a block of page-locked memory takes with the settings of :func:`grow_segments`."""
    exact = size < 1 or _release() >= _PINNED_SINCE
    return int(size) if exact else 1 << (int(size) - 1).bit_length()  # a power of two


def grow_segments() -> bool:
    """Enable expandable segments in torch's allocator, unless it is already configured; return whether it was changed.

    Sequences of varying lengths leave gaps between blocks of fixed size that no later tensor fits into; expandable
    segments have no such gaps. Only CUDA on Linux supports them: on other platforms, including WSL, torch would warn
    and ignore the setting. If CUDA is already initialized, it applies to the segments that are allocated from now on.
    Page-locked host memory is then allocated in exact sizes, if this release of torch can.
    """
    import torch

    if any(os.environ.get(name) for name in VARIABLES) or os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return False
    linux = sys.platform == "linux" and "microsoft" not in platform.release().lower()
    if not linux or torch.version.cuda is None:
        return False
    release = _release()
    settings = f"{_EXPANDABLE},{_PINNED}" if release >= _PINNED_SINCE else _EXPANDABLE
    if not torch.cuda.is_initialized():
        os.environ[VARIABLES[0] if release >= (2, 9) else VARIABLES[1]] = settings
    elif allocator_settings():  # by the user's own call
        return False
    else:
        set_allocator_settings(settings)
    return True


def _release() -> tuple[int, ...]:
    """Major and minor version of torch."""
    import torch

    return tuple(map(int, torch.__version__.split(".")[:2]))
