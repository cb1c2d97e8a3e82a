"""Requests to stop a run: signals, the loss of a launcher, or the file ``STOP`` in the output folder.

Training checks for them where it can stop without losing anything; elsewhere, they interrupt the main thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path

from alignment.config.errors import Leaving

STOP_FILE = "STOP"


class StopReason(IntEnum):
    """What requested the stop. If ranks have seen different reasons, all of them act on the largest."""

    SIGTERM = 1
    SIGHUP = 2
    SIGUSR1 = 3
    STOP = 4
    SIGINT = 5

    @property
    def state(self) -> str:
        """The state of the run in ``status.json``: ``stopped`` by the user, or ``preempted``."""
        return "stopped" if self >= StopReason.STOP else "preempted"

    @property
    def code(self) -> int:
        """The exit status of every rank."""
        return 130 if self >= StopReason.STOP else 85


class RunStopped(Leaving):
    """A run has stopped on request, on every rank; ``message`` tells the user how to resume it."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(reason.code)
        self.reason, self.message = reason, message

    def __str__(self) -> str:
        return self.message


class Cut(Exception):
    """Repeatable work was abandoned on every rank because a stop was requested."""


class StopRequests:
    """The requests that this process has received.

    Attributes:
        reason: the reason to stop, as far as it is known without checking the disk.
        detail: explanation of a reason that is not a signal; otherwise empty.
        deferring: whether the main thread checks for requests; otherwise, they interrupt it.
        may_cut: whether work may be abandoned where all ranks check for requests; in a callback, a step may be done.
        done: the request was carried out, or the work is finished: requests have no effect any more.
    """

    def __init__(self) -> None:
        self.reason: StopReason | None = None
        self.detail, self.deferring, self.may_cut, self.done, self._looked = "", False, False, False, 0.0
        self._file: Path | None = None

    def __str__(self) -> str:
        return (self.reason.name if self.reason else "") + (f" ({self.detail})" if self.detail else "")

    def request(self, reason: StopReason, detail: str = "") -> None:
        """Request a stop. The first request sets the reason, but a user's request overrides those of launchers."""
        if self.reason is None or (reason >= StopReason.STOP and reason > self.reason):
            self.reason, self.detail = reason, detail

    def asked(self, every: float = 1.0) -> StopReason | None:
        """The reason to stop; looks for the file ``STOP`` if the last time was ``every`` seconds ago."""
        if self._file is not None and time.monotonic() - self._looked >= every:
            self._looked = time.monotonic()
            with contextlib.suppress(OSError):
                if self._file.exists():
                    self.request(StopReason.STOP)
        return self.reason

    @contextlib.contextmanager
    def deferred(self, file: Path | None) -> Iterator[None]:
        """Within this context, requests wait until the main thread checks for them, and ``file`` is a request."""
        before, self._file, self.deferring, self.may_cut = self.deferring, file, True, True
        try:
            yield
        finally:
            self._file, self.deferring, self.may_cut = None, before, before

    def forget(self) -> None:
        """Reset to the state of a process that has received no request."""
        self.__init__()  # type: ignore[misc]


REQUESTS = StopRequests()
