"""Processes that want a lock: ``lock_owner.py hold FOLDER`` and ``lock_owner.py race FOLDER ROUNDS PROCESSES``.

``hold`` takes it, prints ``held`` and waits for the end of its input. ``race`` prints, for each round, how many of the
processes got a lock that a dead one had left. Neither imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

from alignment.checkpoint.lock import LOCK, OutputLock
from alignment.checkpoint.owner import Owner
from alignment.config.errors import OutputError


def hold(folder: Path) -> None:
    """Hold the lock, and exit without releasing it."""
    OutputLock(folder).acquire()
    print("held", flush=True)
    sys.stdin.read()


def contend(folder: Path, rounds: int, barrier: Barrier, results: multiprocessing.SimpleQueue[int]) -> None:
    """Take part in every round; the winner keeps the lock until all have tried."""
    for _ in range(rounds):
        lock = OutputLock(folder, wait=lambda seconds: time.sleep(min(seconds, 0.05)))
        barrier.wait()
        won = 0
        with contextlib.suppress(OutputError):
            lock.acquire()
            won = 1
        barrier.wait()
        try:
            lock.check()
        except OutputError:
            won = 100  # two processes held it
        results.put(won)
        lock.release()
        barrier.wait()


def race(folder: Path, rounds: int, processes: int) -> None:
    """Number of winners per round."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes + 1), context.SimpleQueue()
    for _ in range(processes):
        context.Process(target=contend, args=(folder, rounds, barrier, results), daemon=True).start()
    dead = dataclasses.replace(Owner.this_process(), start="0", token="dead")
    winners = []
    for _ in range(rounds):
        (folder / LOCK).write_bytes(dead.text())
        barrier.wait()
        barrier.wait()
        winners.append(sum(results.get() for _ in range(processes)))
        barrier.wait()
    print(*winners)
    print(*(path.name for path in folder.iterdir()))


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(Path(sys.argv[2]))
    else:
        race(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
