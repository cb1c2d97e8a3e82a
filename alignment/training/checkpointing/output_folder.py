"""The output folder before a run writes into it: whether it may, and what an earlier run left there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError
from alignment.engines.checkpoints.folder import CHECKPOINT_PREFIX, checkpoints
from alignment.engines.checkpoints.lock import LOCK
from alignment.engines.watch.ending import STACKS
from alignment.engines.watch.requests import STOP_FILE
from alignment.reporting.durable import replace_text
from alignment.reporting.status_file import STATUS

LOG, COMPLETIONS = "log.jsonl", "completions.jsonl"
_OF_A_RUN = (LOG, "options.json", LOCK)
# How a run holds the folder, says where it stands, is asked to stop, and shows where it hung.
_OF_AN_ATTEMPT = (LOCK, STATUS, f".{STATUS}", STOP_FILE, STACKS)
_MODELS = ("model*.safetensors", "adapter_model.safetensors", "pytorch_model*.bin")


def check_output_folder(
    folder: Path,
    overwrite: bool = False,
    option: str = "output_dir",
    *,
    earlier_run: bool = False,
    files: bool = False,
    ignored: Collection[str] = (),
) -> None:
    """Refuse a folder that cannot be used, leaving nothing behind.

    Args:
        folder: need not exist.
        overwrite: it may hold anything.
        option: what names it.
        earlier_run: it may hold an earlier run.
        files: it may hold anything but checkpoints of an earlier run, as a folder that a script names.
        ignored: names of files that may be in it.

    Raises:
        OutputError: it is a file, cannot be written, or is not empty.
    """
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        if not existing.is_dir():
            raise OutputError(f"{option}: {existing} is not a folder; choose another {option}")
        taken = existing == folder and in_use(folder, ignored) and not overwrite
        if taken and files:
            taken = bool(checkpoints(folder)) or _hidden(folder)
        if taken and not (earlier_run and holds_run(folder)):
            raise OutputError(f"{option}: {folder} is not empty; choose another folder{_ways_out(folder, option)}")
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"{option}: {folder} cannot be written: {reason}; choose another {option}") from error


def _ways_out(folder: Path, option: str) -> str:
    if option != "output_dir":
        return ""
    if checkpoints(folder):
        return ", resume_from_checkpoint: latest to go on with its run, or overwrite_output_dir: true to begin anew"
    return " or set overwrite_output_dir: true"


def in_use(folder: Path, ignored: Collection[str] = ()) -> bool:
    """Whether anything is in the folder beside ``ignored`` and what a run leaves that came to nothing."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return any(not name.startswith(_OF_AN_ATTEMPT) and name not in ignored for name in names)


def holds_run(folder: Path) -> bool:
    """Whether the folder is that of a run, however early that ended."""
    return any((folder / name).exists() for name in _OF_A_RUN) or bool(checkpoints(folder)) or _hidden(folder)


def _hidden(folder: Path) -> bool:
    return any(folder.glob(f".{CHECKPOINT_PREFIX}*"))


def holds_model(folder: Path) -> bool:
    """Whether a model lies in the folder itself, as at the end of a run."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _MODELS)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write readable JSON in the place of what there was, making the folder.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(content, indent=2, default=str) + "\n")
    except OSError as error:
        raise OutputError(f"output_dir: could not write {path}: {error}") from error
