"""Processes that want a lock: ``run_lock.py hold|fork FOLDER`` and ``run_lock.py contend FOLDER ROUNDS``.

``hold`` acquires it, prints ``held`` and waits for the end of its input; ``fork`` does so with a worker, whose ID it
prints, and which outlives it. ``contend`` acquires and releases it again and again; it fails if another process is in
the folder at the same time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

from alignment.run import lock as run_lock
from alignment.run.lock import RunLock


def work(lock: RunLock) -> None:
    """A worker that was forked while the lock was held."""
    lock.release()
    time.sleep(600)


def main(what: str, folder: Path, rounds: int = 0) -> None:
    """Run as described above."""
    run_lock._BRIEF_S = 60.0 if rounds else run_lock._BRIEF_S
    lock = RunLock(folder)
    for _ in range(rounds):
        lock.acquire()
        os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
        lock.check()
        (folder / "inside").unlink()
        lock.release()
    if not rounds:
        lock.acquire()
    if what == "fork":
        worker = multiprocessing.get_context("fork").Process(target=work, args=(lock,))
        worker.start()
        print(worker.pid, flush=True)
    if what != "contend":
        print("held", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
