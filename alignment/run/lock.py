"""The lock of an output folder: one run at a time writes there.

The kernel holds it (``flock``; NFS passes it on to the server) and releases it with the process, however that ends.
The content of ``.lock``, a line that names the process, is only for messages.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from alignment.config.errors import OutputError

LOCK = ".lock"
_BRIEF_S = 2.0  # is_locked() of another process holds a shared lock for an instant
_REQUEUED_S = 120.0  # the host of the earlier start may have died; a file server keeps its lock for about 90 s
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


def is_locked(folder: Path) -> bool | None:
    """Whether a run holds the lock; changes nothing. None on a file system without locks."""
    with contextlib.suppress(OSError), (folder / LOCK).open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return None if error.errno in _NO_LOCKS else True
    return False


def holder(folder: Path) -> str:
    """The last process that acquired the lock, as ``process 7 on node3 (SLURM job 12)``; "" if it is unknown."""
    with contextlib.suppress(OSError):
        return (folder / LOCK).read_text(encoding="utf-8", errors="replace").strip()
    return ""


class RunLock:
    """The right of one rank to write into ``folder``. Trainers of one process share it; forked processes do not."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._acquired = folder, False
        self._lock = FileLock(folder / LOCK, thread_local=False, is_singleton=True, fallback_to_soft=False)
        job, restarts = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
        self._name = f"process {os.getpid()} on {socket.gethostname()}" + (f" (SLURM job {job})" if job else "")
        self._patience_s = _BRIEF_S if restarts == "0" else _REQUEUED_S

    def refuse_if_held(self) -> None:
        """Raise OutputError if another process holds the lock, except in a requeued job; changes nothing."""
        if self._patience_s == _BRIEF_S and not self._lock.is_locked and is_locked(self.folder):
            raise self._refusal()

    def acquire(self) -> None:
        """Create the folder and acquire the lock, for which a requeued job waits; raise OutputError if that fails."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self._patience_s > _BRIEF_S and is_locked(self.folder):
                print(f"output_dir: waiting up to {self._patience_s:.0f} s for {holder(self.folder)}", flush=True)
            try:
                self._lock.acquire(timeout=self._patience_s)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                print(f"output_dir: no file locks in {self.folder}: no other run may write there", flush=True)
            self._acquired = True
            (self.folder / LOCK).write_text(self._name, encoding="utf-8")
        except Timeout:
            raise self._refusal() from None
        except OSError as error:
            self.release()
            raise OutputError(f"output_dir: {self.folder} cannot be locked: {error.strerror or error}") from error
        atexit.register(self.release)  # for callers that never close the trainer

    def check(self) -> None:
        """Raise OutputError if another run has acquired the lock: its file was removed, or a server forgot it."""
        if holder(self.folder) not in ("", self._name):
            raise self._refusal()

    def release(self) -> None:
        """Release the lock if this process holds it; repeated calls, and calls in a fork, have no effect."""
        if not self._acquired:
            return
        self._acquired = False
        with contextlib.suppress(OSError):  # the file alone means nothing, and the kernel releases the lock at exit
            if self._lock.lock_counter == 1 and holder(self.folder) in ("", self._name):
                (self.folder / LOCK).unlink()
            self._lock.release()

    def _refusal(self) -> OutputError:
        user = holder(self.folder) or "another process"
        return OutputError(f"output_dir: {self.folder} is in use by {user}; stop it, or choose another folder")
