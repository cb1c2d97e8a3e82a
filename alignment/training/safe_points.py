"""Points within a step or an evaluation at which all ranks can abandon their work together."""

from __future__ import annotations

import time

from alignment.engines.collectives import largest_numbers
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import world_size
from alignment.run.stop import REQUESTS, Cut, StopReason

_EVERY_S = 2.0  # approximate interval between two exchanges


def agreed_reason(own: StopReason | None) -> StopReason | None:
    """The most urgent stop reason of all ranks. Collective."""
    worst = int(own or 0) if world_size() == 1 else int(largest_numbers([float(own or 0)])[0])
    return StopReason(worst) if worst else None


class SafePoint:
    """Called between two micro-batches, equally often on every rank; raises :class:`Cut` on all ranks or on none.

    Exchanging requests takes a collective, which waits for the GPU. It is done about every two seconds, after a number
    of calls that all ranks derive from the slowest rank's time. That time is known only after the collective and used
    from the next one on; the number of calls therefore grows slowly and drops immediately.
    """

    def __init__(self) -> None:
        self._every, self._calls, self._seconds, self._since = 1, 0, _EVERY_S, time.monotonic()

    def __call__(self) -> None:
        """Record progress of the main thread, which could stop here."""
        ACTIVITY.progress()
        if not REQUESTS.may_cut:
            return
        self._calls += 1
        if self._calls < self._every:
            return
        asked, seconds = float(REQUESTS.asked() or 0), self._seconds
        if world_size() > 1:
            asked, seconds = largest_numbers([asked, seconds])
        now = time.monotonic()
        self._seconds = (now - self._since) / self._calls
        self._every = max(1, min(1000, 2 * self._every, int(_EVERY_S / max(seconds, 1e-6))))
        self._calls, self._since = 0, now
        if asked:
            raise Cut
