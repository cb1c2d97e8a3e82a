"""Repeating what failed for a reason that may pass: a read on a network file system, a call of a server."""

from __future__ import annotations

import errno
import itertools
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from alignment.config.errors import one_line
from alignment.engines.failures import causes
from alignment.engines.launch_env import rank
from alignment.engines.watch.requests import REQUESTS
from alignment.reporting.activity import ACTIVITY

Result = TypeVar("Result")
# What the system reports of a disk or file server, and what of a network, that may be back a moment later.
_ERRNOS = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO),
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, socket.EAI_AGAIN),
}
# Classes of HTTP clients, which have no common base: requests, httpx, urllib3, aiohttp, and what builds on them.
_CLASSES = {
    *("ConnectionError", "ClientConnectionError", "APIConnectionError", "TransportError", "ProtocolError"),
    *("Timeout", "TimeoutError", "TimeoutException", "APITimeoutError", "ChunkedEncodingError", "IncompleteRead"),
}
# Of the hub's client: a ConnectionError that no time mends. The datasets library raises its own, which only names it.
_OFFLINE = "OfflineModeIsEnabled"
_BUSY = {408, 425, 429, 500, 502, 503, 504}  # of HTTP: too early, too many, or the server's own failure
_LONGEST = 300.0  # seconds that a pause grows to
_SLICE = 1.0  # seconds of a pause between two signs of life


def is_transient(error: BaseException) -> bool:
    """Whether the cause of an error may pass by itself: a lost connection, a timeout, a busy server, a failing disk.

    An error is looked through down to its causes. A missing file, a refused permission, a wrong format, an HTTP status
    such as 404, and what the hub's client raises in offline mode never pass.
    """
    passes = False
    for each in causes(error):
        names, status = {kind.__name__ for kind in type(each).__mro__}, _status(each)
        if _OFFLINE in names or _OFFLINE in str(each) or (status is not None and status not in _BUSY):
            return False
        number = each.errno if isinstance(each, OSError) else None
        passes |= number in _ERRNOS or status is not None or (number is None and not names.isdisjoint(_CLASSES))
    return passes


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error stands for, by the names that clients use."""
    for holder in (getattr(error, "response", None), error):
        for name in ("status_code", "status"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


class Retries:
    """Repeats calls that fail for a reason that may pass, after pauses that double, and counts how often.

    Args:
        limit: how often a call is repeated.
        pause: seconds before the first repetition.
        sleep: waits for so many seconds.

    Attributes:
        count: repetitions on all ranks, as far as :meth:`counted` was told of them; a part of the state of a run.
    """

    def __init__(self, limit: int, pause: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self.limit, self.pause, self.count = limit, pause, 0
        self._sleep = sleep
        self._own: list[dict[str, Any]] = []
        self._unwritten: list[dict[str, Any]] = []

    def __call__(self, what: str, call: Callable[[], Result]) -> Result:
        """What ``call`` returns in the end.

        Args:
            what: names it in messages.
            call: what may fail.
        """
        for number in itertools.count(1):
            try:
                return call()
            except Exception as error:
                if not is_transient(error) or not self.again(what, error, number):
                    raise
        raise AssertionError

    def again(self, what: str, error: BaseException, number: int) -> bool:
        """Wait before a call is repeated for the ``number``-th time; False where it is not to be."""
        if number > self.limit:
            return False
        pause = min(self.pause * 2 ** (number - 1), max(_LONGEST, self.pause))
        text = f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__
        here = f"rank {rank()}: " if rank() else ""
        print(f"{here}{what}: {text}; retry {number} of {self.limit} in {pause:g} s", flush=True)
        self._own.append({"event": "retry", "rank": rank(), "of": what, "error": text, "retry": number})
        # Each slice is a sign of life: a rank that waits here is no rank that hangs.
        left = pause
        while left > 0 and REQUESTS.reason is None:  # a run that was asked to stop has little time left
            ACTIVITY.progress()
            self._sleep(min(left, _SLICE))
            left -= _SLICE
        ACTIVITY.progress()
        return True

    def taken(self) -> list[dict[str, Any]]:
        """This rank's repetitions since the last call, to be handed to :meth:`counted` on every rank."""
        own, self._own = self._own, []
        return own

    def counted(self, everyone: list[list[dict[str, Any]]]) -> None:
        """Count what :meth:`taken` gave on each rank."""
        found = [each for own in everyone for each in own]
        self.count += len(found)
        self._unwritten += found

    def write(self, record: Callable[[dict[str, Any]], None]) -> None:
        """Hand what was counted to the log."""
        lines, self._unwritten = self._unwritten, []
        for line in lines:
            record(line)

    @property
    def metrics(self) -> dict[str, float]:
        """The count, for the log; nothing in a run without any."""
        return {"retries": float(self.count)} if self.count else {}

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add what :meth:`state_dict` gave to what this process has repeated since its start."""
        self.count += state["count"]


NEVER = Retries(0, 0.0)
