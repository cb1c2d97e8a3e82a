"""threading, concurrent.futures and tqdm: what is still running or open when a process ends."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import thread as pools
from typing import Any


def before_threads_end(call: Callable[[], None]) -> None:
    """Run ``call`` when the interpreter exits, while thread pools still accept work; ``atexit`` is too late for that.

    The function is private. Seen with Python 3.10 to 3.14.
    """
    threading._register_atexit(call)  # type: ignore[attr-defined]


def leave_daemon_pools() -> None:
    """Let the interpreter exit without the workers of thread pools that daemon threads have started.

    These are daemon threads as well, but ``concurrent.futures`` waits for every worker in a private dictionary, and so
    for a request of a library that never returns. Seen with Python 3.10 to 3.14.
    """
    workers: Any = pools._threads_queues
    for thread in list(workers):
        if thread.daemon:
            workers.pop(thread, None)


def open_bars() -> list[Any]:
    """All open progress bars of this process, of any class; empty if tqdm has not been imported.

    They must be closed before an error message: an open bar leaves the cursor in the middle of a line and redraws
    itself when the interpreter exits. tqdm keeps its bars in a private set, and a subclass may have another one. Seen
    with tqdm 4.70.
    """
    tqdm = sys.modules.get("tqdm")
    kinds = [tqdm.tqdm] if tqdm is not None else []
    bars: dict[int, Any] = {}
    for kind in kinds:
        kinds += kind.__subclasses__()
        bars |= {id(bar): bar for bar in vars(kind).get("_instances", ())}
    return list(bars.values())
