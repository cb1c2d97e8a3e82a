"""Retries after transient failures: a read from a network file system, a call to a server."""

from __future__ import annotations

import errno
import itertools
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from alignment.config.errors import one_line
from alignment.run.activity import ACTIVITY
from alignment.run.failures import causes
from alignment.run.ranks import rank
from alignment.run.requests import REQUESTS

Result = TypeVar("Result")
# Errors of a disk, file server or network that may be available again a moment later.
_ERRNOS = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO),
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.ENETDOWN, errno.ENETUNREACH),
    *(errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, socket.EAI_AGAIN),
}
# Error classes of HTTP clients, which have no common base: requests, httpx, urllib3, aiohttp, and their users.
_CLASSES = {
    *("ConnectionError", "ClientConnectionError", "APIConnectionError", "TransportError", "ProtocolError"),
    *("Timeout", "TimeoutError", "TimeoutException", "APITimeoutError", "ChunkedEncodingError", "IncompleteRead"),
}
# Raised by the Hub's client as a ConnectionError, but permanent. The datasets library wraps it and mentions its name.
_OFFLINE = "OfflineModeIsEnabled"
_BUSY = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses: timeout, too early, too many requests, server failures
_LONGEST = 300.0  # maximum pause in seconds
_SLICE = 1.0  # seconds of a pause between two progress reports


def is_transient(error: BaseException) -> bool:
    """Whether the cause of an error may be temporary: a lost connection, a timeout, a busy server, a failing disk.

    The chain of causes is inspected. A missing file, a denied permission, a wrong format, an HTTP status such as 404,
    and errors of the Hub's client in offline mode are permanent.
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
    """The HTTP status of an error, under the attribute names that clients use."""
    holders = (getattr(error, "response", None), error)
    values = (getattr(holder, name, None) for holder in holders for name in ("status_code", "status"))
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


class Retries:
    """Repeats calls after transient failures, with pauses that double, and counts the retries.

    Args:
        limit: maximum number of retries per call.
        pause: seconds before the first retry.
        sleep: function that waits for a number of seconds.

    Attributes:
        count: retries on all ranks, as reported to :meth:`counted`; part of the state of a run.
    """

    def __init__(self, limit: int, pause: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self.limit, self.pause, self.count = limit, pause, 0
        self._sleep = sleep
        self._own: list[dict[str, Any]] = []
        self._unwritten: list[dict[str, Any]] = []

    def __call__(self, what: str, call: Callable[[], Result]) -> Result:
        """Return the result of ``call``, named ``what`` in messages, which is retried after transient failures."""
        for number in itertools.count(1):
            try:
                return call()
            except Exception as error:
                if not is_transient(error) or not self.again(what, error, number):
                    raise
        raise AssertionError

    def again(self, what: str, error: BaseException, number: int) -> bool:
        """Wait before retry ``number`` of a call; return False if no retry is left."""
        if number > self.limit:
            return False
        left = min(self.pause * 2 ** (number - 1), max(_LONGEST, self.pause))
        text = f"{type(error).__name__}: {one_line(error)}" if str(error) else type(error).__name__
        here = f"rank {rank()}: " if rank() else ""
        print(f"{here}{what}: {text}; retry {number} of {self.limit} in {left:g} s", flush=True)
        self._own.append({"event": "retry", "rank": rank(), "of": what, "error": text, "retry": number})
        # Each slice counts as progress: a rank that waits here does not hang.
        while left > 0 and REQUESTS.reason is None:  # after a request to stop there is little time left
            ACTIVITY.progress()
            self._sleep(min(left, _SLICE))
            left -= _SLICE
        ACTIVITY.progress()
        return True

    def taken(self) -> list[dict[str, Any]]:
        """This rank's retries since the last call, to be passed to :meth:`counted` on every rank."""
        own, self._own = self._own, []
        return own

    def counted(self, everyone: list[list[dict[str, Any]]]) -> None:
        """Add the results of :meth:`taken` of all ranks to the count."""
        found = [each for own in everyone for each in own]
        self.count += len(found)
        self._unwritten += found

    def write(self, record: Callable[[dict[str, Any]], None]) -> None:
        """Write the counted retries to the log."""
        lines, self._unwritten = self._unwritten, []
        for line in lines:
            record(line)

    @property
    def metrics(self) -> dict[str, float]:
        """The count for the log; empty in a run without retries."""
        return {"retries": float(self.count)} if self.count else {}

    def state_dict(self) -> dict[str, Any]:
        """State to save: the count."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add a saved count to the retries of this process since its start."""
        self.count += state["count"]


NEVER = Retries(0, 0.0)
