"""Work shared out among threads, for tools whose work is done by other processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def share_out(items: Iterable[Item], jobs: int, worker: Callable[[int], Callable[[Item], None]]) -> None:
    """Handle every item, several in parallel, and return when all of them are done.

    Args:
        items: handled in their order.
        jobs: number of threads; they are daemons, so that Ctrl-C ends the process.
        worker: called with its number at the start of each thread, to set up what that thread needs; returns what
            handles an item.

    Raises:
        BaseException: whatever a thread raised first. The others finish their items and take no more.
    """
    left: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in items:
        left.put(item)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            handle = worker(number)
            while not failures:
                handle(left.get_nowait())
        except queue.Empty:
            return
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
