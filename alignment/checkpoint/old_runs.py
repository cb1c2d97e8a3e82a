"""Moving an earlier run out of the way when ``overwrite_output_dir`` lets a new one use its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from alignment.config.errors import OutputError
from alignment.models.adapters.record import TRAINING_BASE
from alignment.reporting.durable import sync_folder

PREVIOUS = "previous-"
_MOVING = f".{PREVIOUS}partial"
_CHECKPOINTS = ("checkpoint-*", ".checkpoint-*")
_FILES = (
    *("log.jsonl", "completions.jsonl", "trainer_state.json"),
    *("options.json", "report.md", "report.html", "status.json", "deepspeed.json"),
)
# The model and its tokenizer as a run saves them.
_MODEL = (
    *("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json"),
    *(TRAINING_BASE, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("chat_template*", "README.md"),
)


def set_aside(folder: Path, only: Sequence[Path] | None = None) -> Path | None:
    """Move what an earlier run has written into ``previous-N`` in ``folder``, with the next free N.

    This only renames, so it takes neither time nor space. An interrupted call is completed by the next one. The caller
    holds the lock of the folder.

    Args:
        folder: the output folder.
        only: files and folders to move; None: everything that a run leaves (:func:`left_by_earlier_run`).

    Returns:
        The new folder; None if there was nothing to move.

    Raises:
        OutputError: something could not be moved; the next call continues from there.
    """
    moving, last = folder / _MOVING, folder
    try:
        found = left_by_earlier_run(folder) if only is None else sorted(only, key=_step)
        if any((moving / path.name).exists() for path in found):
            _publish(folder)  # a run has written since the interrupted call, so there are two earlier runs
        if not found and not moving.exists():
            return None
        moving.mkdir(exist_ok=True)
        for last in found:
            os.rename(last, moving / last.name)
        sync_folder(moving)
        last = moving
        return _publish(folder)
    except OSError as error:
        raise OutputError(
            f"output_dir: could not move {last} of the earlier run: {error.strerror or error}; move it manually, or "
            "choose another output_dir"
        ) from error


def set_folder_aside(folder: Path) -> Path | None:
    """Rename a non-empty folder to ``NAME.previous-N``; return None if there is nothing to rename.

    Raises:
        OutputError: it cannot be renamed.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    number = 1
    while (target := folder.with_name(f"{folder.name}.{PREVIOUS}{number}")).exists():
        number += 1
    try:
        os.rename(folder, target)
    except OSError as error:
        raise OutputError(f"{folder}: could not be renamed to {target.name}: {error.strerror or error}") from error
    return target


def left_by_earlier_run(folder: Path) -> list[Path]:
    """What an earlier run left: checkpoints from oldest to newest, then logs and reports, then the model.

    In this order, a resume after an interrupted call starts from the newest checkpoint or from scratch.
    """
    checkpoints = {path for pattern in _CHECKPOINTS for path in folder.glob(pattern)}
    files = [folder / name for name in _FILES if (folder / name).exists()]
    model = sorted(path for pattern in _MODEL for path in folder.glob(pattern))
    return [*sorted(checkpoints, key=_step), *files, *model]


def _step(path: Path) -> tuple[int, str]:
    digits = path.name.partition("checkpoint-")[2].partition(".")[0]
    return (int(digits) if digits.isdecimal() else -1, path.name)


def _publish(folder: Path) -> Path | None:
    """Give the moved files their final folder name; return None if there are none."""
    moving = folder / _MOVING
    if not any(moving.iterdir()):
        moving.rmdir()
        return None
    numbers = [path.name.removeprefix(PREVIOUS) for path in folder.glob(f"{PREVIOUS}*")]
    target = folder / f"{PREVIOUS}{max((int(n) for n in numbers if n.isdecimal()), default=0) + 1}"
    os.rename(moving, target)
    sync_folder(folder)
    return target
