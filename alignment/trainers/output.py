"""The output folder: checked before anything is loaded, made when there is something to write."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError

CHECKPOINT_PREFIX = "checkpoint-"


def check_output_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be used, leaving nothing behind.

    Raises:
        OutputError: it is a file, cannot be written, or is not empty (unless ``overwrite``).
    """
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        if not existing.is_dir():
            raise OutputError(f"output_dir: {existing} is not a folder; choose another output_dir")
        if existing == folder and any(folder.iterdir()) and not overwrite:
            raise OutputError(
                f"output_dir: {folder} is not empty; choose another folder or set overwrite_output_dir: true"
            )
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"output_dir: {folder} cannot be written: {reason}; choose another output_dir") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON, making the folder.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"output_dir: could not write {path}: {error}") from error


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, the oldest step first."""
    found = [p for p in folder.glob(f"{CHECKPOINT_PREFIX}*") if p.name.removeprefix(CHECKPOINT_PREFIX).isdigit()]
    return sorted(found, key=lambda p: int(p.name.removeprefix(CHECKPOINT_PREFIX)))


def prune_checkpoints(folder: Path, limit: int | None, keep: Path | None = None) -> None:
    """Remove the oldest checkpoints until ``limit`` are left. The newest and ``keep`` stay in any case."""
    found = checkpoints(folder)
    if limit is None or not found:
        return
    dear = [found[-1], *([keep] if keep in found[:-1] else [])]
    ordered = [*dear, *(path for path in reversed(found) if path not in dear)]
    for old in ordered[max(limit, len(dear)) :]:
        shutil.rmtree(old)
