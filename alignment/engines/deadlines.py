"""Calls that may not return: name look-ups, connections to a process that is stopped, writes to a disk that hangs."""

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
    """What ``call`` returns, or raises.

    It runs in a thread, which is left behind if it takes longer, so that signals reach the main thread meanwhile.

    Args:
        seconds: that it may take.
        call: what to do.
        every: called several times a second with the seconds waited so far.

    Raises:
        TimeoutError: it took longer.
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
            raise TimeoutError(f"no answer within {seconds:g} s")
        every(waited)
    if failed:
        raise failed[0]
    return found[0]


def bounded(call: Callable[[], Result], seconds: float) -> Result | None:
    """What ``call`` returns; None if it takes longer or raises.

    For last words: to a store whose process is stopped, a disk that hangs, a terminal that takes nothing. There is
    nothing to be done about a failure.
    """
    with contextlib.suppress(Exception):
        return within(seconds, call)
    return None
