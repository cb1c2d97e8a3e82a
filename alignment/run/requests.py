"""Requests to stop this process: signals, the loss of a launcher, or the file ``STOP`` in the output folder.

Training checks for them where it can stop without losing anything; elsewhere, they interrupt the main thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from alignment.run.stop import StopReason

STOP_FILE = "STOP"
_FILE_POLL_S = 1.0


class StopRequests:
    """The requests that this process has received.

    Attributes:
        reason: the reason to stop, as far as it is known without checking the disk.
        detail: explanation of a reason that is not a signal; otherwise empty.
        deferring: whether the main thread checks for requests by itself and must not be interrupted.
        in_callback: whether a callback is running, whose work must not be abandoned: its step may have been taken.
        done: the request was carried out, or the work is finished: nothing is interrupted any more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason: StopReason | None = None
        self.detail, self.deferring, self.in_callback, self.done = "", False, False, False
        self._clock, self._looked = clock, float("-inf")
        self._file: Path | None = None

    def __str__(self) -> str:
        return (self.reason.name if self.reason else "") + (f" ({self.detail})" if self.detail else "")

    @property
    def may_cut(self) -> bool:
        """Whether work may be abandoned where all ranks check for requests."""
        return self.deferring and not self.in_callback

    def request(self, reason: StopReason, detail: str = "") -> None:
        """Request a stop. The first request sets the reason, but a user's request overrides those of launchers."""
        if self.reason is None or (reason.by_user and reason > self.reason):
            self.reason, self.detail = reason, detail

    def asked(self, every: float = _FILE_POLL_S) -> StopReason | None:
        """The reason to stop; looks for the file ``STOP`` if the last time was ``every`` seconds ago."""
        file = self._file
        if file is not None and self._clock() - self._looked >= every:
            self._looked = self._clock()
            with contextlib.suppress(OSError):
                if file.exists():
                    self.request(StopReason.STOP)
        return self.reason

    @contextlib.contextmanager
    def deferred(self, file: Path | None) -> Iterator[None]:
        """Within this context, requests wait until the main thread checks for them, and ``file`` is a request."""
        self._file, before, self.deferring = file, self.deferring, True
        try:
            yield
        finally:
            self._file, self.deferring = None, before

    def forget(self) -> None:
        """Reset to the state of a process that has received no request."""
        self.reason, self.detail, self.done = None, "", False


REQUESTS = StopRequests()
