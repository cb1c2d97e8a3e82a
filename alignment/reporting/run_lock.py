"""Whether a run holds its output folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

LOCK = ".lock"


def is_locked(folder: Path) -> bool:
    """Whether a run holds the lock; changes nothing. Without file locks, the file stands for it until a clean end."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder(folder: Path) -> str:
    """The process that holds the lock or left it behind, as ``process 7 on node3 (SLURM job 12)``; "" if unknown."""
    try:
        return (folder / LOCK).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
