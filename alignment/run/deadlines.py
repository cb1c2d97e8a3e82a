"""Calls that may never return: connections to a suspended process, writes to a hanging disk."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return the result of ``call``, or raise its exception; the main thread can receive signals meanwhile.

    Raises:
        TimeoutError: the call exceeded the limit. Its thread is abandoned.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not future.done():
        raise TimeoutError(f"no response within {seconds:g} s")
    return future.result()


def bounded(call: Callable[[], Result], seconds: float) -> Result | None:
    """Return the result of one of the last calls before an exit; None if it exceeds ``seconds`` or raises."""
    with contextlib.suppress(Exception):  # nothing can be done about it
        return within(seconds, call)
    return None
