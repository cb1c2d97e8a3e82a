"""Configuration of torch's GPU allocator, which must be set before the first allocation."""

from __future__ import annotations

import os
import platform
import sys

# The last two are older names that torch still reads.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def grow_segments() -> bool:
    """Enable expandable segments in torch's allocator, unless the environment already configures it.

    Sequences of varying lengths leave gaps between blocks of fixed size that no later tensor fits into; expandable
    segments have no such gaps. The setting must precede the first allocation, and only CUDA on Linux supports it: on
    other platforms, including WSL, torch would warn and ignore it.

    Returns:
        Whether the setting was changed.
    """
    import torch

    if any(os.environ.get(name) for name in VARIABLES) or os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return False
    linux = sys.platform == "linux" and "microsoft" not in platform.release().lower()
    if not linux or torch.version.cuda is None or torch.cuda.is_initialized():
        return False
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    os.environ[VARIABLES[0] if release >= (2, 9) else VARIABLES[1]] = _EXPANDABLE
    return True
