"""Calls that may never return: name lookups, connections to a suspended process, writes to a hanging disk."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
_SLICE_S = 0.2


def within(
    seconds: float, call: Callable[[], Result], *, every: Callable[[float], None] = lambda waited: None
) -> Result:
    """Return the result of ``call``, or raise its exception.

    It runs in a thread, which is abandoned if it takes too long, so that the main thread can receive signals.

    Args:
        seconds: time limit.
        call: the function to call.
        every: called several times a second with the seconds waited so far.

    Raises:
        TimeoutError: the call exceeded the limit.
    """
    found: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    begun = time.monotonic()
    thread.start()
    while thread.is_alive():
        thread.join(max(0.0, min(_SLICE_S, seconds - (time.monotonic() - begun))))
        waited = time.monotonic() - begun
        if thread.is_alive() and waited >= seconds:
            raise TimeoutError(f"no response within {seconds:g} s")
        every(waited)
    if failed:
        raise failed[0]
    return found[0]


def bounded(call: Callable[[], Result], seconds: float) -> Result | None:
    """Return the result of ``call``; None if it exceeds ``seconds`` or raises.

    For the last calls before an exit, to a suspended store, a hanging disk or a blocked terminal. Failures are ignored
    because nothing can be done about them.
    """
    with contextlib.suppress(Exception):
        return within(seconds, call)
    return None
