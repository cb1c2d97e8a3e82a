"""Points within a step or an evaluation at which all ranks can abandon their work together."""

from __future__ import annotations

import time
from collections.abc import Callable

from alignment.engines.collectives import largest_numbers
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import world_size
from alignment.run.requests import REQUESTS, StopRequests
from alignment.run.stop import Cut, StopReason

_EVERY_S = 2.0  # approximate interval between two exchanges
_MOST = 1000


def agreed_reason(own: StopReason | None) -> StopReason | None:
    """The most urgent stop reason of all ranks. Collective."""
    if world_size() == 1:
        return own
    worst = int(largest_numbers([float(own or 0)])[0])
    return StopReason(worst) if worst else None


class SafePoint:
    """Called between two micro-batches, equally often on every rank; raises :class:`Cut` on all ranks or on none.

    Exchanging requests takes a collective, which has to wait for the GPU. It is therefore done about every two
    seconds, after a number of calls that all ranks derive from the slowest rank's time. Calls are counted across
    windows. The time of a call is known only after the collective, when the GPU has caught up, and is used from the
    next exchange on; the number of calls therefore grows slowly and drops immediately.

    Args:
        requests: stop requests of this process.
        clock: clock in seconds.
    """

    def __init__(self, requests: StopRequests = REQUESTS, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._clock = requests, clock
        self._every, self._calls, self._first = 1, 0, True
        self._since: float | None = None
        self._seconds = _EVERY_S

    def __call__(self) -> None:
        """Record progress of the main thread, which could stop here."""
        ACTIVITY.progress()
        if not self._requests.may_cut:
            return
        if self._since is None:
            self._since = self._clock()
        if self._first:
            self._first = False
            return
        self._calls += 1
        if self._calls < self._every:
            return
        asked, seconds = float(self._requests.asked() or 0), self._seconds
        if world_size() > 1:
            asked, seconds = largest_numbers([asked, seconds])
        now = self._clock()
        self._seconds = (now - self._since) / self._calls
        self._every = max(1, min(_MOST, 2 * self._every, int(_EVERY_S / max(seconds, 1e-6))))
        self._calls, self._since = 0, now
        if asked:
            raise Cut

    def restart(self) -> None:
        """Mark the next call as the first of a window: the ranks have just agreed, so it makes no exchange."""
        self._first = True
