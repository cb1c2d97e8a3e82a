"""Checks of the output folder before a run writes to it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from alignment.checkpoint.folder import CHECKPOINT_PREFIX, checkpoints
from alignment.checkpoint.lock import LOCK
from alignment.checkpoint.old_runs import left_by_earlier_run
from alignment.config.errors import OutputError, setting
from alignment.reporting.durable import replace_text
from alignment.reporting.status_file import STATUS
from alignment.run.activity import ACTIVITY
from alignment.run.requests import STOP_FILE
from alignment.run.stacks import STACKS

LOG, COMPLETIONS = "log.jsonl", "completions.jsonl"
_OF_A_RUN = (LOG, "options.json", LOCK)
# Files by which a run locks the folder, reports its status, is asked to stop, and shows where it hung.
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
    """Refuse a folder that cannot be used; leaves nothing behind.

    Args:
        folder: need not exist.
        overwrite: whether it may contain anything.
        option: name of the option, for messages.
        earlier_run: whether it may contain an earlier run.
        files: whether it may contain anything except checkpoints of an earlier run, like a folder named by a script.
        ignored: names of files that may be in it.

    Raises:
        OutputError: if it is a file, cannot be written, or is not empty.
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


def check_inputs_stay(folder: Path, inputs: Iterable[tuple[str, str]]) -> None:
    """Refuse an output folder whose files the run both reads and would replace or move aside.

    Args:
        folder: the output folder.
        inputs: options and paths or Hub names.

    Raises:
        OutputError: names the first such option.
    """
    taken = [path.resolve() for path in left_by_earlier_run(folder)]
    for option, name in inputs:
        path = Path(name).expanduser().resolve()
        if path.exists() and (path == folder.resolve() or any(part in taken for part in (path, *path.parents))):
            raise OutputError(
                f"output_dir: {folder} contains {setting(option, name)}, which the run would overwrite or move; "
                "choose another output_dir"
            )


def _ways_out(folder: Path, option: str) -> str:
    if option != "output_dir":
        return ""
    if ACTIVITY.guarded:
        resume, overwrite = "set resume_from_checkpoint: latest", "set overwrite_output_dir: true"
    else:
        resume, overwrite = "call train(resume_from_checkpoint=True)", "set overwrite_output_dir=True"
    return f", {resume} to resume its run, or {overwrite} to start over" if checkpoints(folder) else f" or {overwrite}"


def in_use(folder: Path, ignored: Collection[str] = ()) -> bool:
    """Whether the folder contains anything except ``ignored`` and the remains of a run that saved nothing."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return any(not name.startswith(_OF_AN_ATTEMPT) and name not in ignored for name in names)


def holds_run(folder: Path) -> bool:
    """Whether the folder contains a run, even one that ended early."""
    return any((folder / name).exists() for name in _OF_A_RUN) or bool(checkpoints(folder)) or _hidden(folder)


def _hidden(folder: Path) -> bool:
    return any(folder.glob(f".{CHECKPOINT_PREFIX}*"))


def holds_model(folder: Path) -> bool:
    """Whether the folder itself contains a model, as at the end of a run."""
    return any(next(folder.glob(pattern), None) is not None for pattern in _MODELS)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON, replacing the file; creates the folder.

    Raises:
        OutputError: if it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(content, indent=2, default=str) + "\n")
    except OSError as error:
        raise OutputError(f"output_dir: cannot write {path}: {error}") from error
