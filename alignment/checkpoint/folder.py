"""Checkpoint folders: creation, removal and listing.

Each change that a reader can see is a single rename. Checkpoints that are being written or removed have hidden names,
and the leftovers of a killed process are cleared by the next one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from alignment.run.durable import sync_folder

CHECKPOINT_PREFIX = "checkpoint-"


def checkpoint_folder(folder: Path, step: int) -> Path:
    """The checkpoint folder of a step."""
    return folder / f"{CHECKPOINT_PREFIX}{step}"


def checkpoint_step(path: Path) -> int | None:
    """The step in the name of a checkpoint folder; None for any other name."""
    number = path.name.removeprefix(CHECKPOINT_PREFIX)
    return int(number) if path.name.startswith(CHECKPOINT_PREFIX) and number.isdecimal() else None


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoint folders, oldest step first."""
    found = ((checkpoint_step(path), path) for path in folder.glob(f"{CHECKPOINT_PREFIX}*"))
    return [path for _, path in sorted((step, path) for step, path in found if step is not None and path.is_dir())]


def partial_of(target: Path) -> Path:
    """The hidden folder in which a checkpoint is written before it is published."""
    return target.with_name(f".{target.name}.partial")


def publish(partial: Path, target: Path) -> None:
    """Make a checkpoint visible after all its files have been written."""
    sync_folder(partial)
    os.rename(partial, target)
    with contextlib.suppress(OSError):  # published; if a crash loses the name, the previous checkpoint is used
        sync_folder(target.parent)


def clear_leftovers(folder: Path) -> None:
    """Remove checkpoints that were being written or removed when an earlier process ended."""
    for ending in ("partial", "removed"):
        for path in folder.glob(f".{CHECKPOINT_PREFIX}*.{ending}"):
            with contextlib.suppress(OSError):
                _delete(path)


def prune_checkpoints(folder: Path, limit: int | None, keep: Path | None = None) -> None:
    """Remove the oldest checkpoints until ``limit`` are left. The newest one and ``keep`` are never removed."""
    found = checkpoints(folder)
    # The same folder may be spelled differently after a resume: relative or absolute, or through a link.
    old = [path for path in found[:-1] if keep is None or path.resolve() != keep.resolve()]
    for path in [] if limit is None else old[: max(len(found) - limit, 0)]:
        hidden = path.with_name(f".{path.name}.removed")  # it vanishes immediately, then its files are deleted
        with contextlib.suppress(OSError):
            _delete(hidden)
        os.rename(path, hidden)
        _delete(hidden)


def _delete(path: Path) -> None:
    """Delete a folder, or a link to one."""
    path.unlink() if path.is_symlink() else shutil.rmtree(path)
