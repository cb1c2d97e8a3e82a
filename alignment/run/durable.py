"""Atomic file replacement and syncing: neither a reader nor a restart after a crash finds a partial file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError

FULL = (errno.ENOSPC, errno.EDQUOT)  # the errors of a full disk and of a used-up quota
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def is_full(error: BaseException | None) -> bool:
    """Whether an error or one of its causes means that the disk is full or the quota exceeded."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__
    return False


def replace_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically: ``path`` has either its old or its new content, also after a crash.

    Only one process may write a given file at a time. Raises OSError, with ``path`` unchanged, if that fails.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder itself may be the problem
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON, replacing the file; creates the folder. Raises OutputError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(content, indent=2, default=str) + "\n")
    except OSError as error:
        raise OutputError(f"output_dir: cannot write {path}: {error}") from error


def sync(path: Path, flags: int = os.O_RDONLY) -> None:
    """Flush the contents of a file to disk. Raises OSError, for example if the disk is full."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk: files created, renamed or removed in it. Raises OSError if the disk fails.

    File systems that do not support this order such changes themselves; their error is ignored.
    """
    try:
        sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
