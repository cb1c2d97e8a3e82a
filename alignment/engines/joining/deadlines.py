"""Calls that may not return: name look-ups, and connections to a process that does not answer."""

from __future__ import annotations

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
        thread.join(_SLICE_S)
        waited = time.monotonic() - begun
        if thread.is_alive() and waited >= seconds:
            raise TimeoutError(f"no answer within {seconds:g} s")
        every(waited)
    if failed:
        raise failed[0]
    return found[0]
