"""End this process with one line for the user, whatever hangs: nothing waits for a disk or terminal for long."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import psutil

from alignment.config.errors import AlignmentError
from alignment.internals.tqdm import open_bars
from alignment.run.activity import ACTIVITY
from alignment.run.deadlines import bounded
from alignment.run.failures import describe, is_lost_peer
from alignment.run.ranks import rank, world_size
from alignment.run.stacks import write_stacks
from alignment.run.stop import RunStopped, StopReason

_WRITE_S = 2.0  # limit for a write to a terminal or a disk
_REPORT_S = 10.0  # that the report of a failed run may take
_LONGEST_S = 25.0  # limit for everything before the exit
_LATER_S = 2.0  # a launcher that reports the first exit as the cause should pick the rank that writes the line


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

    @classmethod
    def by_request(cls, reason: StopReason, line: str) -> Ending:
        """The end of a job that was asked to stop."""
        return cls(line, reason.code, reason.state, reason.name)


def ending_of(error: BaseException) -> Ending:
    """Return why a job ends with this error."""
    if isinstance(error, RunStopped):
        return Ending.by_request(error.reason, error.message)
    line, is_bug = describe(error)
    if line:
        where = "" if isinstance(error, AlignmentError) else f" in {ACTIVITY.place}"  # its message says where
        line = f"error: rank {rank()}{where}: {line}" if world_size() > 1 else f"error: {line}"
    if isinstance(error, KeyboardInterrupt):
        return Ending.by_request(StopReason.SIGINT, line)
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    trace = "".join(traceback.format_exception(error)) if is_bug else ""
    return Ending(line, code, trace=trace, lost=is_lost_peer(error))


def end_with(ending: Ending, *, speaks: bool = True, last: Callable[[], None] = lambda: None) -> NoReturn:
    """Report why the job ends, and exit with the status of the ending.

    Without ``speaks``, another rank writes the line, and this one exits later. ``last`` is called before the exit.
    """
    limit = threading.Timer(_LONGEST_S, end_process, [ending.code])
    limit.daemon = True
    limit.start()
    try:
        if speaks and ending.line:
            write(ending.trace + ending.line)
        with contextlib.suppress(OSError):
            _mute()  # torch may still report broken connections of other threads
        if ending.stacks:
            write_stacks(ACTIVITY.folder, rank())
        record(ending)
        bounded(last, _REPORT_S)
        time.sleep(0.0 if speaks else _LATER_S)
    finally:
        end_process(ending.code)


def record(ending: Ending, seconds: float = _WRITE_S) -> None:
    """Record in ``status.json`` how the run ended, if this process writes that file and the disk responds."""
    status = ACTIVITY.status
    if status is not None:
        failed, line = ending.state == "failed", ending.line.strip().removeprefix("error: ")
        error = (line or f"exit status {ending.code}") if failed else None
        bounded(lambda: status.update(state=ending.state, signal=ending.signal, error=error), seconds)
        if failed and not ending.stacks and ACTIVITY.at_failure is not None:
            bounded(ACTIVITY.at_failure, _REPORT_S)


def write(text: str) -> None:
    """Write `text` to stderr, after closing this process's progress bars, which redraw themselves at the exit."""
    start = "\n" if world_size() > 1 else ""  # another rank's bar may have left the cursor in the middle of a line
    bounded(lambda: [bar.close() for bar in open_bars()], _WRITE_S)
    bounded(lambda: sys.stdout.flush(), _WRITE_S)
    bounded(lambda: (sys.stderr.write(f"{start}{text}\n"), sys.stderr.flush()), _WRITE_S)


def write_beside_bars(text: str) -> None:
    """On rank 0, write a line to stderr during a run; its progress bars are redrawn below it."""
    tqdm = sys.modules.get("tqdm")
    put = sys.stderr.write if tqdm is None else lambda line: tqdm.tqdm.write(line, file=sys.stderr, end="")
    if rank() == 0:
        bounded(lambda: (put(text + "\n"), sys.stderr.flush()), _WRITE_S)


def _mute() -> None:
    """Redirect stdout and stderr to /dev/null, also for C++ libraries."""
    bounded(lambda: (sys.stdout.flush(), sys.stderr.flush()), _WRITE_S)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def end_process(code: int) -> NoReturn:
    """Exit without waiting for blocked threads, and kill forked workers, which would otherwise wait forever."""
    try:
        own = psutil.Process()
        for child in own.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.exe() == own.exe():  # not a reporting service, which may still have data to send
                    child.kill()  # data loader workers ignore the other signals
    finally:
        os._exit(code)
