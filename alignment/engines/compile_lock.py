"""The lock under which DeepSpeed compiles its ops at their first use, and its removal after a killed process.

torch locks the folder of an extension with a file named `lock`, and waits as long as that exists. If every process
that could hold it is visible, it is removed once none does. Otherwise a process of another host may be compiling;
after a while the user is asked to check.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from alignment.config.errors import AlignmentError
from alignment.internals.torch import looking_before_builds

_LOOK_S, _LOOK_LATER_S, _PAUSE_S = 1.0, 10.0, 0.1
_TELL_S = 30.0
_LIMIT_S = 600.0  # how long to wait for a process that is not visible
_FIRST_PID_SPACE = 0xEFFFFFFC  # inode number of the host's own PID namespace in Linux
_OVERLAY = 0x794C7630
# ext4, xfs, btrfs, tmpfs, f2fs, zfs, bcachefs: not visible to other hosts; the values are those of statfs(2).
_LOCAL = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E, _OVERLAY})


@dataclass(frozen=True)
class _Lock:
    """A lock file, distinguishable from a later one of the same name."""

    device: int
    inode: int
    made: int
    owner: int

    @classmethod
    def at(cls, path: Path) -> _Lock | None:
        try:
            found = path.stat()
        except FileNotFoundError:
            return None
        return cls(found.st_dev, found.st_ino, found.st_mtime_ns, found.st_uid)


@dataclass(frozen=True)
class _Seen:
    """Result of inspecting the processes of this host.

    Attributes:
        holder: PID of the process that holds the lock, if found.
        everybody: whether all processes that could hold the lock were visible.
    """

    holder: int | None
    everybody: bool


@contextlib.contextmanager
def abandoned_locks_removed() -> Iterator[None]:
    """Within this context, the lock of a killed process does not block builds.

    Raises:
        AlignmentError: a lock persists, and its holder cannot be determined.
    """
    with looking_before_builds(wait_for_release):
        yield


def wait_for_release(path: Path) -> None:
    """Wait until a lock is released; remove it if no process holds it.

    Raises:
        AlignmentError: the lock persists, and its holder cannot be determined.
    """
    began = time.monotonic()
    known: _Lock | None = None
    since, unheld, told = began, 0, False
    while (lock := _Lock.at(path)) is not None:
        now = time.monotonic()
        if lock != known:
            known, since, unheld = lock, now, 0
        seen = _look(lock)
        if seen.holder is not None:
            since, unheld = now, 0
        elif seen.everybody and _is_private(path.parent):
            unheld += 1
            # A process that has just created the file may not have been observed with it yet.
            if unheld > 1 and _remove(path, lock):
                return
        elif now - since > _LIMIT_S:
            raise AlignmentError(
                f"{path} is a compilation lock that no process of this host has held for {_LIMIT_S / 60:.0f} minutes; "
                "if no other host or container is compiling, it was left by a killed process: remove the file and "
                "start again"
            )
        if not told and now - began > _TELL_S and os.environ.get("LOCAL_RANK", "0") == "0":
            told = True
            who = "another process" if seen.holder is None else f"process {seen.holder}"
            _tell(f"waiting for {who} to compile in {path.parent}")
        _sleep_while(path, min(_LOOK_LATER_S, max(_LOOK_S, (now - began) / 5)))


def _sleep_while(path: Path, seconds: float) -> None:
    """Sleep until the next check, or until the file is gone."""
    end = time.monotonic() + seconds
    while path.exists() and time.monotonic() < end:
        time.sleep(_PAUSE_S)


def _remove(path: Path, lock: _Lock) -> bool:
    """Remove a lock without a holder, unless another process has already done so and taken it."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # one process at a time decides
        if _Lock.at(path) != lock or _look(lock).holder is not None:
            return False
        path.unlink()
    finally:
        os.close(folder)
    _tell(f"removed {path}, which a killed process had left")
    return True


def _look(lock: _Lock) -> _Seen:
    """Search for a process that has the file open."""
    everybody = os.geteuid() in (0, lock.owner)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            descriptors = list(os.scandir(process / "fd"))
        except PermissionError:
            with contextlib.suppress(OSError):
                everybody = everybody and process.stat().st_uid != lock.owner
            continue
        except OSError:  # it has ended
            continue
        if any(_is(descriptor.path, lock) for descriptor in descriptors):
            return _Seen(int(process.name), everybody)
    return _Seen(None, everybody)


def _is(descriptor: str, lock: _Lock) -> bool:
    with contextlib.suppress(OSError):  # closed in the meantime
        # Stat only files of this name: others may be on a disk that does not respond.
        if os.readlink(descriptor).endswith("/lock"):
            found = os.stat(descriptor)
            return (found.st_dev, found.st_ino) == (lock.device, lock.inode)
    return False


def _is_private(folder: Path) -> bool:
    """Whether a folder is accessible only to processes visible to this one: no other hosts or containers."""
    kind = _file_system(folder)
    # A container's root file system is its own; any other folder may be shared with a second container.
    return kind == _OVERLAY or (kind in _LOCAL and os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_SPACE)


def _file_system(folder: Path) -> int | None:
    """The file system type as returned by statfs(2); None if unavailable."""
    answer = (ctypes.c_ulong * 64)()
    try:
        failed = ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), ctypes.byref(answer))
    except (AttributeError, OSError):
        return None
    return None if failed else int(answer[0]) & 0xFFFFFFFF


def _tell(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
