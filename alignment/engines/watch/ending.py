"""Ending this process, whatever its threads are waiting for, with one line for the user.

A disk or a terminal may hang, and be the reason for the end: nothing here waits for either for more than seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn, TextIO

from alignment.engines.deadlines import bounded
from alignment.internals.tqdm import open_bars

STACKS = "hang-"  # how the names of files with stacks begin
WRITE_S = 2.0  # that a terminal or a disk may take
# What builds DeepSpeed's extensions, and holds the lock that the next start waits for.
_COMPILERS = ("ninja", "nvcc", "cicc", "ptxas", "cudafe++", "c++", "g++", "gcc", "clang", "cc1plus", "hipcc", "ld")


def write(text: str) -> None:
    """Write `text` to stderr as whole lines in one call, after closing this process's progress bars.

    An open bar leaves the cursor within a line, and draws itself once more as the interpreter ends. Neither a bar that
    another thread is drawing nor a terminal that was closed keeps anything else from happening.
    """
    bounded(_close_bars, WRITE_S)
    bounded(lambda: _flush(sys.stdout), WRITE_S)
    bounded(lambda: sys.stderr.write(text + "\n"), WRITE_S)
    bounded(lambda: _flush(sys.stderr), WRITE_S)


def _close_bars() -> None:
    for bar in open_bars():
        bar.close()


def write_beside_bars(text: str) -> None:
    """Write a line to stderr while the run goes on; its progress bars are drawn again below it."""
    bounded(lambda: _write_beside_bars(text), WRITE_S)


def _write_beside_bars(text: str) -> None:
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
    bounded(_flush_all, WRITE_S)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _flush_all() -> None:
    _flush(sys.stdout)
    _flush(sys.stderr)


def end_process(code: int) -> NoReturn:
    """End without waiting for blocked threads, and take forked workers along: alone they would wait forever."""
    try:
        _end_children()
        bounded(_flush_all, WRITE_S)
    finally:
        os._exit(code)


def _end_children() -> None:
    import psutil

    own = psutil.Process()
    for child in own.children(recursive=True):
        try:
            # Python workers, and compilers; a reporting service may still have to send what it holds.
            if child.exe() == own.exe() or child.name().startswith(_COMPILERS):
                child.kill()  # the workers of a data loader ignore softer signals
        except psutil.Error:
            continue


def end_within(seconds: float, code: int) -> None:
    """End this process with ``code`` after so many seconds, if it has not ended by itself."""
    thread = threading.Timer(seconds, end_process, [code])
    thread.name, thread.daemon = "alignment-end", True
    thread.start()


def write_stacks(folder: Path | None, rank: int) -> Path | None:
    """Write where every thread of this process is into ``hang-RANK.txt``; its path, or None if that failed."""
    path = (folder or Path()) / f"{STACKS}{rank}.txt"

    def dump() -> Path:
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return path

    return bounded(dump, WRITE_S)
