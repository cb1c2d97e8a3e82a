"""Retries after transient failures: a read from a network file system, a call to a server."""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from alignment.config.errors import one_line
from alignment.run.activity import ACTIVITY
from alignment.run.ending import causes
from alignment.run.stop import REQUESTS

Result = TypeVar("Result")
_ERRNOS = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EHOSTUNREACH, errno.ENETUNREACH, socket.EAI_AGAIN}
# Error classes of HTTP clients, which have no common base: requests, httpx, urllib3, aiohttp, and their users.
_CLASSES = re.compile("Connection|Timeout|TransportError|ProtocolError|ChunkedEncodingError|IncompleteRead")
_OFFLINE = "OfflineModeIsEnabled"  # a ConnectionError of the Hub's client; the datasets library mentions its name
_BUSY = {408, 425, 429, 500, 502, 503, 504}  # HTTP statuses


def is_transient(error: BaseException) -> bool:
    """Whether an error or a cause of it may be temporary: a lost connection, a timeout, a busy server, a bad disk."""
    passes = False
    for each in causes(error):
        names = " ".join(kind.__name__ for kind in type(each).__mro__)
        holder = each if getattr(each, "response", None) is None else each.response  # type: ignore[attr-defined]
        status = getattr(holder, "status_code", getattr(holder, "status", None))
        if _OFFLINE in f"{names} {each}" or (isinstance(status, int) and status not in _BUSY):
            return False
        passes |= status in _BUSY or getattr(each, "errno", None) in _ERRNOS or bool(_CLASSES.search(names))
    return passes


def is_offline(error: BaseException) -> bool:
    """Whether the Hub could not be reached, and its local cache does not have what was requested."""
    names = (_OFFLINE, "LocalEntryNotFoundError")
    return any(name in f"{type(each).__name__} {each}" for each in causes(error) for name in names)


class Retries:
    """Repeats calls after transient failures, up to ``limit`` times after pauses that double, and counts retries."""

    def __init__(self, limit: int, pause: float) -> None:
        self.limit, self.pause, self.count, self._own = limit, pause, 0, 0

    def __call__(self, what: str, call: Callable[[], Result]) -> Result:
        """Return the result of ``call``, named ``what`` in messages, which is retried after transient failures."""
        number = 0
        while True:
            try:
                return call()
            except Exception as error:
                number += 1
                if not is_transient(error) or not self.again(what, error, number):
                    raise

    def again(self, what: str, error: BaseException, number: int) -> bool:
        """Wait before retry ``number`` of a call; return False if no retry is left."""
        if number > self.limit:
            return False
        left = min(self.pause * 2 ** (number - 1), max(300.0, self.pause))
        text = f"{type(error).__name__}: {one_line(error)}".removesuffix(": ")
        print(f"{what}: {text}; retry {number} of {self.limit} in {left:g} s", flush=True)
        self._own += 1
        while left > 0 and REQUESTS.reason is None:  # after a request to stop there is little time left
            ACTIVITY.progress()  # a rank that waits here does not hang
            time.sleep(min(left, 1.0))
            left -= 1.0
        return True

    def taken(self) -> int:
        """This rank's number of retries since the last call."""
        own, self._own = self._own, 0
        return own

    def counted(self, everyone: list[int]) -> None:
        """Add the results of :meth:`taken` of all ranks to the count."""
        self.count += sum(everyone)

    @property
    def metrics(self) -> dict[str, float]:
        """The count for the log, if there were retries."""
        return {"retries": float(self.count)} if self.count else {}

    def state_dict(self) -> dict[str, Any]:
        """The count."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Add a saved count to the retries of this process since its start."""
        self.count += state["count"]


NEVER = Retries(0, 0.0)
