"""threading and concurrent.futures: what the interpreter waits for when it exits."""

from __future__ import annotations

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
