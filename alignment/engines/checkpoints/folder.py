"""Checkpoint folders: how they appear, how they go, and which there are.

Each change that a reader can see is one rename. What is being written or removed has a hidden name, and what a killed
process left behind under such a name is cleared away by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from alignment.reporting.durable import sync_folder

CHECKPOINT_PREFIX = "checkpoint-"
_PARTIAL, _REMOVED = ".partial", ".removed"


def checkpoint_folder(folder: Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder / f"{CHECKPOINT_PREFIX}{step}"


def checkpoint_step(path: Path) -> int | None:
    """The step of a checkpoint by the name of its folder; None for any other name."""
    number = path.name.removeprefix(CHECKPOINT_PREFIX)
    return int(number) if path.name.startswith(CHECKPOINT_PREFIX) and number.isdecimal() else None


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, the oldest step first."""
    found = ((checkpoint_step(path), path) for path in folder.glob(f"{CHECKPOINT_PREFIX}*"))
    return [path for _, path in sorted((step, path) for step, path in found if step is not None and path.is_dir())]


def partial_of(target: Path) -> Path:
    """Where a checkpoint is written before it is there."""
    return target.with_name(f".{target.name}{_PARTIAL}")


def publish(partial: Path, target: Path) -> None:
    """Make a checkpoint visible whose files are all on disk."""
    sync_folder(partial)
    os.rename(partial, target)
    with contextlib.suppress(OSError):  # it is there; if the machine loses the name, the one before is taken
        sync_folder(target.parent)


def remove(path: Path) -> None:
    """Remove a checkpoint: out of sight at once, then file by file."""
    hidden = path.with_name(f".{path.name}{_REMOVED}")
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    if hidden.is_symlink():
        hidden.unlink()  # what it points to is not ours to remove
    else:
        shutil.rmtree(hidden)


def clear_leftovers(folder: Path) -> None:
    """Remove what was being written or removed when an earlier process ended."""
    for ending in (_PARTIAL, _REMOVED):
        for path in folder.glob(f".{CHECKPOINT_PREFIX}*{ending}"):
            shutil.rmtree(path, ignore_errors=True)


def prune_checkpoints(folder: Path, limit: int | None, keep: Path | None = None) -> None:
    """Remove the oldest checkpoints until ``limit`` are left. The newest and ``keep`` stay in any case."""
    found = checkpoints(folder)
    if limit is None or not found:
        return
    dear = [found[-1], *([keep] if keep in found[:-1] else [])]
    ordered = [*dear, *(path for path in reversed(found) if path not in dear)]
    for old in ordered[max(limit, len(dear)) :]:
        remove(old)
