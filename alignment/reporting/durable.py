"""Files that are replaced or synced as a whole: a reader, or a restart after a crash, never finds half of one."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)  # the errors of a full disk and of a used-up quota
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that the disk is full or the quota used up."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__
    return False


def replace_text(path: Path, text: str) -> None:
    """Write a UTF-8 file so that ``path`` has either its old content or all of the new one, also after a crash.

    The text goes to a hidden file beside it first, which a failure removes. A file that only one process at a time
    writes is expected.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder may be what is wrong
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync(path: Path) -> None:
    """Return when the content of a file is on the disk.

    Raises:
        OSError: it cannot be read or, the disk being full, not be kept.
    """
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Return when a folder's entries are on the disk: what was made, renamed or removed in it.

    File systems that cannot sync a folder order such changes themselves, and are left to it.

    Raises:
        OSError: it is no folder, or the disk fails.
    """
    try:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
