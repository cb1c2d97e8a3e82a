"""Ending this process, whatever its threads are waiting for, with one line for the user."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO, TypeVar

from alignment.internals.tqdm import open_bars

STACKS = "hang-"  # how the names of files with stacks begin
Result = TypeVar("Result")


def write(text: str) -> None:
    """Write `text` to stderr as whole lines in one call, after closing this process's progress bars.

    An open bar leaves the cursor within a line, and draws itself once more as the interpreter ends.
    """
    for bar in open_bars():
        bar.close()
    _flush(sys.stdout)
    sys.stderr.write(text + "\n")
    _flush(sys.stderr)


def write_beside_bars(text: str) -> None:
    """Write a line to stderr while the run goes on; its progress bars are drawn again below it."""
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None:
        tqdm.tqdm.write(text, file=sys.stderr)
    else:
        sys.stderr.write(text + "\n")
    _flush(sys.stderr)


def _flush(stream: TextIO) -> None:
    # A reader who has gone (`| head`) must not keep the error from stderr, nor a process from ending.
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


def mute() -> None:
    """Send stdout and stderr to nowhere at the level of the process, so that libraries in C++ are silent too."""
    _flush(sys.stdout)
    _flush(sys.stderr)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def end_process(code: int) -> NoReturn:
    """End without waiting for blocked threads, and take forked workers along: alone they would wait forever."""
    import psutil

    own = psutil.Process()
    for child in own.children(recursive=True):
        try:
            # Only Python workers: a reporting service may still have to send what it holds.
            if child.exe() == own.exe():
                child.kill()  # those of a data loader ignore softer signals
        except psutil.Error:
            continue
    _flush(sys.stdout)
    _flush(sys.stderr)
    os._exit(code)


def bounded(call: Callable[[], Result], seconds: float) -> Result | None:
    """What ``call`` returns; None if it takes longer or raises.

    A call to a store whose process is stopped, or whose host is cut off, may not return at all.
    """
    found: list[Result] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # it is asked as a last word: there is nothing to do about a failure
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def write_stacks(folder: Path | None, rank: int) -> Path | None:
    """Write where every thread of this process is into ``hang-RANK.txt``; its path, or None if that failed."""
    path = (folder or Path()) / f"{STACKS}{rank}.txt"
    try:
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
    except OSError:
        return None
    return path
