"""The largest resident set of this process during a stretch of work.

Linux keeps such a mark for the whole life of a process, and resetting it would falsify what others measure: it is
sampled instead, by a thread that sleeps while nothing is being measured.
"""

from __future__ import annotations

import threading
import time

import psutil

_EVERY_S = 0.01


class ResidentSampler:
    """Samples every 10 ms between :meth:`start` and :meth:`stop`; a shorter peak may be missed."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._active = threading.Event()
        self._peak = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a stretch."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="resident-set", daemon=True)
            self._thread.start()
        self._peak = self._resident()
        self._active.set()

    def stop(self) -> int:
        """End it; return its peak in bytes."""
        self._active.clear()
        return max(self._peak, self._resident())

    def _resident(self) -> int:
        return int(self._process.memory_info().rss)

    def _watch(self) -> None:
        while True:
            self._active.wait()
            self._peak = max(self._peak, self._resident())
            time.sleep(_EVERY_S)


SAMPLER = ResidentSampler()
