"""Stack traces of a process that hangs, and a switch that ends it even if no Python code can run.

A rank whose interpreter lock is held, for example by a long regular expression, cannot end itself in Python; the timer
of ``faulthandler`` can. Stack traces are first written to a local file, because the disk of the output folder may be
what hangs.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from alignment.run.deadlines import bounded

STACKS = "hang-"  # prefix of the files with stack traces
_COPY_S = 2.0
_EVERY_S = 1.0
_LONGEST_S = 30 * 86400.0


def write_stacks(folder: Path | None, rank: int) -> None:
    """Write the stack traces of all threads to ``hang-RANK.txt`` of the output folder, or at least to a local file."""
    file = bounded(lambda: _local_file(rank), _COPY_S)
    if file is not None:
        faulthandler.dump_traceback(file, all_threads=True)
        _move(file, (folder or Path()) / f"{STACKS}{rank}.txt")


def _local_file(rank: int) -> IO[str]:
    return tempfile.NamedTemporaryFile("w", prefix=f"alignment-{STACKS}{rank}-", suffix=".txt", delete=False)


def _move(file: IO[str], target: Path) -> None:
    """Move a local file unless the disk of the target does not respond. An empty file is removed."""

    def move() -> None:
        if Path(file.name).stat().st_size:
            shutil.copyfile(file.name, target)
        os.unlink(file.name)

    file.close()
    bounded(move, _COPY_S)


class DeadManSwitch:
    """Ends the process once no rank has made progress for too long; a thread keeps it from doing so.

    ``faulthandler`` has one timer per process. A timer that someone else has set is left alone, and so is one that is
    set while this switch is armed; only one that was set before this module was imported goes unnoticed.

    Args:
        rank: this rank.
        exits: whether to end the process after its stack traces were written.
        folder: returns the output folder.
    """

    def __init__(self, rank: int, *, exits: bool, folder: Callable[[], Path | None]) -> None:
        self._rank, self._exits, self._folder = rank, exits, folder
        self._file = bounded(lambda: _local_file(rank), _COPY_S)
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
            self._set_timer()

    def _set_timer(self) -> None:
        if self._file is not None and self._seconds and not _of_others:
            _set(self._seconds, exit=self._exits, file=self._file)

    def disarm(self) -> None:
        """Cancel the timer; if it has run off without ending the process, move what it wrote to the output folder."""
        global _armed
        with self._lock:
            file, self._file, _armed = self._file, None, None
            if not _of_others:
                _cancel()
        if file is not None:
            _move(file, (self._folder() or Path()) / f"{STACKS}{self._rank}.txt")


_set, _cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
_of_others = False  # whether someone else has set the timer; there is no way to ask
_armed: DeadManSwitch | None = None


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
        _armed._set_timer()
        _armed._lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, in_child=False),
    after_in_child=functools.partial(_after_fork, in_child=True),
)


def _set_by_others(*arguments: Any, **options: Any) -> None:
    global _of_others
    _of_others = True
    _set(*arguments, **options)


def _cancelled_by_others() -> None:
    global _of_others
    _of_others = False
    _cancel()


faulthandler.dump_traceback_later = _set_by_others
faulthandler.cancel_dump_traceback_later = _cancelled_by_others
