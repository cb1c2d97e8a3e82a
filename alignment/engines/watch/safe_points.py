"""Places within a step or an evaluation where all ranks may give up what they are doing, together."""

from __future__ import annotations

import time
from collections.abc import Callable

from alignment.engines.collectives import largest_numbers
from alignment.engines.launch_env import world_size
from alignment.engines.watch.requests import REQUESTS, StopRequests
from alignment.engines.watch.stop import Cut, StopReason
from alignment.reporting.activity import ACTIVITY

_EVERY_S = 2.0  # about how often ranks ask each other
_MOST = 1000


def agreed_reason(own: StopReason | None) -> StopReason | None:
    """What asked any rank to stop, by the one that has seen the most urgent reason. Collective."""
    if world_size() == 1:
        return own
    worst = int(largest_numbers([float(own or 0)])[0])
    return StopReason(worst) if worst else None


class SafePoint:
    """Called between two micro-batches, as often on every rank; raises :class:`Cut` on all ranks or on none.

    Asking the others takes a collective, for which a GPU has to be waited for. So it is done about every two seconds,
    after a number of calls that all ranks derive from the slowest one's time. Calls are counted on from window to
    window. The time of a call is known after the collective only, when a GPU has done what it was given, and counts
    from the next one on; so the number grows slowly, and falls at once.

    Args:
        requests: what this process was asked.
        clock: in seconds.
    """

    def __init__(self, requests: StopRequests = REQUESTS, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests, self._clock = requests, clock
        self._every, self._calls, self._first = 1, 0, True
        self._since: float | None = None
        self._seconds = _EVERY_S

    def __call__(self) -> None:
        """The main thread has got on, and could stop here."""
        ACTIVITY.progress()
        if not self._requests.deferring:
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
        """The next call is the first one of a window. Ranks have agreed a moment ago, so that it is none to ask at."""
        self._first = True
