"""How torch allocates GPU memory, which has to be settled before it allocates any."""

from __future__ import annotations

import os
import platform
import sys

# The last two are older names, which torch reads as well.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"


def grow_segments() -> bool:
    """Let torch's allocator grow the segments it has, unless the environment says how it is to allocate.

    Sequences of ever new lengths leave gaps between blocks of fixed size that no later tensor fits in; segments that
    grow have none. It has to be settled before the first allocation, and only CUDA on Linux has it: elsewhere, under
    WSL too, torch would warn and ignore it.

    Returns:
        Whether that was done now.
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
