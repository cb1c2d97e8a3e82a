"""What has asked this process to stop: signals, a launcher that has gone, or the file ``STOP`` in the output folder.

A request sets a flag. Training looks at it where it can stop without losing anything; everywhere else, where there is
nothing to lose, the main thread is interrupted as by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from alignment.engines.watch.stop import StopReason

STOP_FILE = "STOP"
_FILE_POLL_S = 1.0


class StopRequests:
    """The requests that this process has received. Any thread may make one.

    Args:
        clock: in seconds.

    Attributes:
        deferring: whether the main thread looks at requests by itself, and must not be interrupted by one.
        detail: what lies behind the reason where it is no signal; else empty.
        done: the request was obeyed, or the work is done: nothing is to be interrupted any more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.deferring = self.done = False
        self.detail = ""
        self._clock, self._lock = clock, threading.RLock()  # a handler may run while it is held
        self._reason: StopReason | None = None
        self._file: Path | None = None
        self._looked = float("-inf")

    def request(self, reason: StopReason, detail: str = "") -> bool:
        """Ask for a stop. The first request names the reason, but a person's outranks those of launchers.

        Returns:
            Whether this request names the reason now.
        """
        with self._lock:
            if self._reason is None or (reason.by_user and reason > self._reason):
                self._reason, self.detail = reason, detail
                return True
        return False

    @property
    def reason(self) -> StopReason | None:
        """What asked this process to stop, as far as it is known without looking at the disk."""
        with self._lock:
            return self._reason

    def asked(self, every: float = _FILE_POLL_S) -> StopReason | None:
        """What asked this process to stop.

        Args:
            every: look for the file ``STOP`` as well, unless it was looked for within so many seconds.
        """
        if self._file is not None and self._clock() - self._looked >= every:
            self._looked = self._clock()
            with contextlib.suppress(OSError):
                if self._file.exists():
                    self.request(StopReason.STOP)
        return self.reason

    @contextlib.contextmanager
    def deferred(self, file: Path | None) -> Iterator[None]:
        """Within this context requests wait until the main thread asks for them.

        Args:
            file: whose appearance is a request as well; None on ranks that leave looking for it to another.
        """
        self._file, before, self.deferring = file, self.deferring, True
        try:
            yield
        finally:
            self._file, self.deferring = None, before

    def look_until(self, over: threading.Event) -> None:
        """Look for the file ``STOP`` again and again: the main thread may be waiting for other ranks to hear of it.

        For a thread of its own, which a disk that hangs may keep.
        """
        while not over.wait(_FILE_POLL_S):
            if self.deferring:
                self.asked()

    def renew_lock(self) -> None:
        """In a forked worker: another thread of its parent may have held the lock."""
        self._lock = threading.RLock()

    def forget(self) -> None:
        """As in a process that has received none."""
        with self._lock:
            self._reason, self.detail, self.done = None, "", False


REQUESTS = StopRequests()
os.register_at_fork(after_in_child=REQUESTS.renew_lock)
