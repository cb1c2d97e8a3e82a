"""Requests to stop this process: signals, the loss of a launcher, or the file ``STOP`` in the output folder.

A request sets a flag. Training checks it where it can stop without losing anything; everywhere else, where there is
nothing to lose, the main thread is interrupted as by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from alignment.run.stop import StopReason

STOP_FILE = "STOP"
_FILE_POLL_S = 1.0


class StopRequests:
    """The requests that this process has received. Any thread may make one.

    Args:
        clock: clock in seconds.

    Attributes:
        deferring: whether the main thread checks for requests by itself and must not be interrupted.
        detail: explanation of a reason that is not a signal; otherwise empty.
        done: the request was carried out, or the work is finished: nothing is interrupted any more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.deferring = self.done = False
        self.detail = ""
        self._clock, self._lock = clock, threading.RLock()  # a handler may run while it is held
        self._reason: StopReason | None = None
        self._file: Path | None = None
        self._looked = float("-inf")

    def request(self, reason: StopReason, detail: str = "") -> bool:
        """Request a stop. The first request sets the reason, but a user's request overrides those of launchers.

        Returns:
            Whether this request now sets the reason.
        """
        with self._lock:
            if self._reason is None or (reason.by_user and reason > self._reason):
                self._reason, self.detail = reason, detail
                return True
        return False

    @property
    def reason(self) -> StopReason | None:
        """The reason to stop, as far as it is known without checking the disk."""
        with self._lock:
            return self._reason

    def asked(self, every: float = _FILE_POLL_S) -> StopReason | None:
        """The reason to stop, including the file ``STOP``.

        Args:
            every: minimum interval between two checks for the file ``STOP``, in seconds.
        """
        if self._file is not None and self._clock() - self._looked >= every:
            self._looked = self._clock()
            with contextlib.suppress(OSError):
                if self._file.exists():
                    self.request(StopReason.STOP)
        return self.reason

    @contextlib.contextmanager
    def deferred(self, file: Path | None) -> Iterator[None]:
        """Within this context, requests wait until the main thread checks for them.

        Args:
            file: a file whose appearance counts as a request; None on ranks that leave this check to another.
        """
        self._file, before, self.deferring = file, self.deferring, True
        try:
            yield
        finally:
            self._file, self.deferring = None, before

    def look_until(self, over: threading.Event) -> None:
        """Poll for the file ``STOP``: the main thread may be waiting for other ranks that need to learn of it.

        Runs in a separate thread, which a hanging disk may block.
        """
        while not over.wait(_FILE_POLL_S):
            if self.deferring:
                self.asked()

    def renew_lock(self) -> None:
        """Replace the lock in a forked worker: another thread of the parent may have held it."""
        self._lock = threading.RLock()

    def forget(self) -> None:
        """Reset to the state of a process that has received no request."""
        with self._lock:
            self._reason, self.detail, self.done = None, "", False


REQUESTS = StopRequests()
os.register_at_fork(after_in_child=REQUESTS.renew_lock)
