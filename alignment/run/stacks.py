"""Stack traces of a process that hangs, and a switch that ends it even if its interpreter lock is held.

Stack traces are first written to a local file, because the disk of the output folder may be what hangs.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from alignment.run.deadlines import bounded

STACKS = "hang-"  # prefix of the files with stack traces
_COPY_S = 2.0
_EVERY_S = 1.0
_LONGEST_S = 30 * 86400.0


def write_stacks(folder: Path | None, rank: int) -> None:
    """Write the stack traces of all threads to ``hang-RANK.txt`` of the output folder, or at least to a local file."""

    def move(file: IO[str]) -> None:
        shutil.copyfile(file.name, (folder or Path()) / f"{STACKS}{rank}.txt")
        os.unlink(file.name)

    file = bounded(lambda: _local_file(rank), _COPY_S)
    if file is not None:
        with file:
            faulthandler.dump_traceback(file, all_threads=True)
        bounded(lambda: move(file), _COPY_S)


def _local_file(rank: int) -> IO[str]:
    return tempfile.NamedTemporaryFile("w", prefix=f"alignment-{STACKS}{rank}-", suffix=".txt", delete=False)


class DeadManSwitch:
    """Writes stack traces to a local file and, with ``exits``, ends the process unless a thread keeps it from it.

    ``faulthandler`` has one timer per process. Once someone else has set it, no switch of this process sets or cancels
    it any more; only a timer that was set before this module was imported goes unnoticed.
    """

    def __init__(self, rank: int, *, exits: bool) -> None:
        self._exits, self._file = exits, bounded(lambda: _local_file(rank), _COPY_S)
        self._mark: Any = None
        self._seconds, self._at = 0.0, float("-inf")
        self._lock = threading.Lock()  # a timer that is set after disarming would end the process
        global _armed
        _armed = self

    def keep(self, mark: Any, seconds: float) -> None:
        """Set the timer to ``seconds`` if ``mark``, which stands for the progress of all ranks, has changed."""
        now = time.monotonic()
        with self._lock:
            if self._file is None or mark == self._mark or now - self._at < _EVERY_S or _of_others:
                return
            self._mark, self._at, self._seconds = mark, now, min(seconds, _LONGEST_S)
            _set(self._seconds, exit=self._exits, file=self._file)

    def disarm(self) -> None:
        """Cancel the timer, and remove the file if nothing was written to it."""
        global _armed
        with self._lock:
            file, self._file, _armed = self._file, None, None
            if not _of_others:
                _cancel()
        if file is not None:
            file.close()
            if not os.path.getsize(file.name):
                os.unlink(file.name)


_set, _cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
_of_others = False  # whether someone else has set the timer; there is no way to ask
_armed: DeadManSwitch | None = None


def _set_by_others(*arguments: Any, **options: Any) -> None:
    global _of_others
    _of_others = True
    _set(*arguments, **options)


faulthandler.dump_traceback_later = _set_by_others


def _before_fork() -> None:
    # A child that exits while the timer is set would wait forever for the timer's thread, which it does not have.
    if _armed is not None:
        _armed._lock.acquire()
        if not _of_others:
            _cancel()


def _after_fork(in_child: bool) -> None:
    if _armed is not None:
        if in_child:
            _armed._file = None
        elif _armed._file is not None and _armed._seconds and not _of_others:
            _set(_armed._seconds, exit=_armed._exits, file=_armed._file)
        _armed._lock.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=lambda: _after_fork(False), after_in_child=lambda: _after_fork(True)
)
