"""End this process, whatever its threads are blocked on, with one line for the user.

A hanging disk or terminal may be the cause of the failure, so nothing here waits for either for more than seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn, TextIO

from alignment.internals.tqdm import open_bars
from alignment.run.deadlines import bounded

STACKS = "hang-"  # prefix of the files with stack traces
WRITE_S = 2.0  # limit for a write to a terminal or a disk
# Processes that build DeepSpeed's extensions and hold the lock that the next start would wait for.
_COMPILERS = ("ninja", "nvcc", "cicc", "ptxas", "cudafe++", "c++", "g++", "gcc", "clang", "cc1plus", "hipcc", "ld")


def write(text: str) -> None:
    """Write `text` to stderr in one call, after closing this process's progress bars.

    An open bar leaves the cursor in the middle of a line and redraws itself when the interpreter exits. Neither a bar
    that another thread is drawing nor a closed terminal prevents the remaining writes.
    """
    bounded(_close_bars, WRITE_S)
    bounded(lambda: _flush(sys.stdout), WRITE_S)
    bounded(lambda: sys.stderr.write(text + "\n"), WRITE_S)
    bounded(lambda: _flush(sys.stderr), WRITE_S)


def _close_bars() -> None:
    for bar in open_bars():
        bar.close()


def write_beside_bars(text: str) -> None:
    """Write a line to stderr during a run; its progress bars are redrawn below it."""
    bounded(lambda: _write_beside_bars(text), WRITE_S)


def _write_beside_bars(text: str) -> None:
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None:
        tqdm.tqdm.write(text, file=sys.stderr)
    else:
        sys.stderr.write(text + "\n")
    _flush(sys.stderr)


def _flush(stream: TextIO) -> None:
    # A closed pipe (`| head`) must not keep the error from stderr, nor the process from exiting.
    with contextlib.suppress(OSError, ValueError):
        stream.flush()


def mute() -> None:
    """Redirect stdout and stderr to /dev/null at the process level, which silences C++ libraries too."""
    bounded(_flush_all, WRITE_S)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _flush_all() -> None:
    _flush(sys.stdout)
    _flush(sys.stderr)


def end_process(code: int) -> NoReturn:
    """Exit without waiting for blocked threads, and kill forked workers, which would otherwise wait forever."""
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
            # Python workers and compilers; a reporting service may still have data to send.
            if child.exe() == own.exe() or child.name().startswith(_COMPILERS):
                child.kill()  # data loader workers ignore the other signals
        except psutil.Error:
            continue


def end_within(seconds: float, code: int) -> None:
    """Exit with ``code`` after ``seconds``, unless the process has ended by then."""
    thread = threading.Timer(seconds, end_process, [code])
    thread.name, thread.daemon = "alignment-end", True
    thread.start()


def write_stacks(folder: Path | None, rank: int) -> Path | None:
    """Write the stack traces of all threads to ``hang-RANK.txt``; return its path, or None if that failed."""
    path = (folder or Path()) / f"{STACKS}{rank}.txt"

    def dump() -> Path:
        with path.open("w", encoding="utf-8") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return path

    return bounded(dump, WRITE_S)
