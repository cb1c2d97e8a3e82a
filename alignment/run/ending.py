"""End this process with one line for the user, whatever hangs: nothing waits for a disk or terminal for long."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import psutil

from alignment.config.errors import AlignmentError
from alignment.internals.tqdm import open_bars
from alignment.run.activity import ACTIVITY
from alignment.run.failures import describe, is_lost_peer
from alignment.run.ranks import rank, world_size
from alignment.run.stop import RunStopped, StopReason

Result = TypeVar("Result")
STACKS = "hang-"  # prefix of the files with stack traces
_WRITE_S = 2.0  # limit for a write to a terminal or a disk
_REPORT_S = 10.0  # that the report of a failed run may take
_LATER_S = 2.0  # a launcher that reports the first exit as the cause should pick the rank that writes the line
_EVERY_S, _LONGEST_S = 1.0, 30 * 86400.0  # between two settings of the dead-man switch; its longest time


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of ``call``, or raise its exception; after ``seconds``, abandon it with a TimeoutError."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(seconds)


def bounded(call: Callable[[], Result], seconds: float) -> Result | None:
    """Return the result of one of the last calls before an exit; None if it exceeds ``seconds`` or raises."""
    with contextlib.suppress(Exception):  # nothing can be done about it
        return within(seconds, call)
    return None


@dataclass(frozen=True)
class Ending:
    """Why a job ends, as its ranks tell each other."""

    line: str  # message for the user
    code: int = 1  # exit status of every rank
    state: str = "failed"  # of status.json, as the signal
    signal: str | None = None
    stacks: bool = False  # whether every rank writes its stack traces
    trace: str = ""  # the traceback of a bug, which precedes the line
    lost: bool = False  # whether a connection to another rank broke, whose end may be noticed later
    grace: float = 0.0  # seconds in which other ranks may still end by themselves


def ending_of(error: BaseException) -> Ending:
    """Return why a job ends with this error."""
    if isinstance(error, RunStopped):
        return Ending(error.message, error.reason.code, error.reason.state, error.reason.name)
    line, is_bug = describe(error)
    if line:
        where = "" if isinstance(error, AlignmentError) else f" in {ACTIVITY.place}"  # its message says where
        line = f"error: rank {rank()}{where}: {line}" if world_size() > 1 else f"error: {line}"
    if isinstance(error, KeyboardInterrupt):
        return Ending(line, StopReason.SIGINT.code, StopReason.SIGINT.state, StopReason.SIGINT.name)
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1
    trace = "".join(traceback.format_exception(error)) if is_bug else ""
    return Ending(line, code, trace=trace, lost=is_lost_peer(error))


def end_with(ending: Ending, *, speaks: bool = True, last: Callable[[], None] = lambda: None) -> NoReturn:
    """Exit as the ending says, after a call of ``last``; without ``speaks``, another rank writes the line."""
    try:
        write(ending.trace + ending.line if speaks else "")
        if ending.stacks:
            write_stacks()
        record(ending)
        bounded(last, _REPORT_S)
        time.sleep(0.0 if speaks else _LATER_S)
        own = psutil.Process()
        for child in own.children(recursive=True):  # forked workers, which would otherwise wait forever
            with contextlib.suppress(psutil.Error):
                if child.exe() == own.exe():  # not a reporting service, which may still have data to send
                    child.kill()
    finally:
        os._exit(ending.code)


def record(ending: Ending, seconds: float = _WRITE_S) -> None:
    """Record in ``status.json`` how the run ended, if this process writes that file and the disk responds."""
    status = ACTIVITY.status
    if status is not None:
        failed = ending.state == "failed"
        error = (ending.line.removeprefix("error: ") or f"exit status {ending.code}") if failed else None
        bounded(lambda: status.update(state=ending.state, signal=ending.signal, error=error), seconds)
        if failed and not ending.stacks and ACTIVITY.at_failure is not None:
            bounded(ACTIVITY.at_failure, _REPORT_S)


def write(text: str) -> None:
    """Write `text` to stderr, if any, after closing progress bars, which would redraw themselves over it."""
    start = "\n" if world_size() > 1 else ""  # another rank's bar may have left the cursor in the middle of a line
    bounded(lambda: [bar.close() for bar in open_bars()], _WRITE_S)
    bounded(lambda: sys.stdout.flush(), _WRITE_S)
    if text:
        bounded(lambda: (sys.stderr.write(f"{start}{text}\n"), sys.stderr.flush()), _WRITE_S)


def write_stacks() -> None:
    """Write the stack traces of all threads to a local file; move it to the output folder unless its disk hangs."""
    with contextlib.suppress(OSError), _local_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        bounded(lambda: shutil.move(file.name, (ACTIVITY.folder or Path()) / f"{STACKS}{rank()}.txt"), _WRITE_S)


def _local_file() -> IO[str]:
    return tempfile.NamedTemporaryFile("w", prefix=f"alignment-{STACKS}{rank()}-", suffix=".txt", delete=False)


class DeadManSwitch:
    """Writes stack traces to a local file and may end the process, unless a thread keeps it from it.

    It acts even if the interpreter lock is held. ``faulthandler`` has one timer per process: once someone else has set
    it, the switch leaves it alone; only a timer that was set before this module was imported goes unnoticed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # a timer that is set after disarming would end the process
        self._file: IO[str] | None = None  # while it is armed
        self._exits, self._at, self._of_others = False, 0.0, False
        self._set, self._cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later
        faulthandler.dump_traceback_later = self._set_by_others

    def _set_by_others(self, *arguments: Any, **options: Any) -> None:
        self._of_others = True
        self._set(*arguments, **options)

    @contextlib.contextmanager
    def armed(self, seconds: float, *, exits: bool) -> Iterator[None]:
        """Within the outermost such context, act after ``seconds`` unless kept from it."""
        if self._file is not None:
            yield
            return
        with contextlib.suppress(OSError):
            self._file = _local_file()
        self._exits, self._at = exits, float("-inf")
        self.keep(seconds)  # the interpreter lock may be held before the thread comes to it
        try:
            yield
        finally:
            with self._lock:
                file, self._file = self._file, None
                if not self._of_others:
                    self._cancel()
            if file is not None:
                file.close()
                if not os.path.getsize(file.name):
                    os.unlink(file.name)

    def keep(self, seconds: float) -> None:
        """If it is armed, keep it from acting for the next ``seconds``; has an effect once a second."""
        with self._lock:
            if self._file is not None and not self._of_others and time.monotonic() - self._at >= _EVERY_S:
                self._at = time.monotonic()
                self._set(min(seconds, _LONGEST_S), exit=self._exits, file=self._file)


SWITCH = DeadManSwitch()
