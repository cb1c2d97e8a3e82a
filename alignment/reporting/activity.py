"""What this process is doing: phase, step, and when it last made progress; for whoever watches it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from alignment.reporting.status_file import StatusFile

_GAP_S = 3.0  # longer than any watcher lets pass between two ticks


@dataclass(frozen=True)
class Limits:
    """How long a phase may go without progress, in seconds; see :meth:`Activity.limit`.

    Attributes:
        least: whatever was seen before.
        factor: times the longest stretch without progress that was seen in the phase.
        first: while the phase is passed through for the first time.
        silence: how long a rank may send no sign of life.
    """

    least: float = 600.0
    factor: float = 5.0
    first: float = 3600.0
    silence: float = 25.0


class Activity:
    """The phase that the main thread is in, and its progress.

    Written by the main thread, read by others. Progress is whatever cannot happen while a rank hangs: entering and
    leaving a phase, a micro-batch, a generated token, a tokenised batch of rows. Whoever watches calls :meth:`tick`
    all the time; what lies between two ticks that are far apart is time in which the process stood still.

    Args:
        clock: in seconds.

    Attributes:
        step: the last completed optimizer step.
        limits: how long a phase may go without progress.
        moves: phases entered and left so far; ranks that compute the same go through the same ones.
        folder: where the run writes, once that is known; on every rank.
        status: ``status.json`` of the run, on the first rank.
        guarded: whether somebody outside of the run writes its end into the status.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step, self.limits, self.moves = 0, Limits(), 0
        self._clock, self._lock = clock, threading.Lock()
        self._phases = ["start"]
        self._longest: dict[str, float] = {}
        self._passed: set[str] = set()
        self._last = clock()
        self._tick: float | None = None
        self.folder: Path | None = None
        self.status: StatusFile | None = None
        self.guarded = False

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Within this context the process is in ``phase``."""
        self.progress()
        self._phases.append(phase)
        self.moves += 1
        try:
            yield
            self._passed.add(phase)
        finally:
            self.progress()
            self._phases.pop()
            self.moves += 1

    @property
    def phase(self) -> str:
        """The innermost phase; ``start`` before any."""
        return self._phases[-1]

    def progress(self) -> None:
        """The main thread has got on with its work."""
        now = self._clock()
        with self._lock:
            phase = self.phase
            self._longest[phase] = max(self._longest.get(phase, 0.0), self._counted(now) - self._last)
            self._last = now

    def tick(self) -> float:
        """Called several times a second by each thread that watches.

        Returns:
            Seconds for which the process has stood still through no fault of its own, if this call is the first after
            them: a suspended job, a sleeping machine. They do not count as time without progress.
        """
        now = self._clock()
        with self._lock:
            gap = 0.0 if self._tick is None else now - self._tick
            self._tick = now
            if gap <= _GAP_S:
                return 0.0
            self._last = min(now, self._last + gap)
            return gap

    def _counted(self, now: float) -> float:
        """Up to when time counts: the main thread may go on before a watcher has seen that the process stood still."""
        stood_still = self._tick is not None and now - self._tick > _GAP_S
        return max(self._tick, self._last) if stood_still and self._tick is not None else now

    @property
    def idle(self) -> float:
        """Seconds since the last progress."""
        with self._lock:
            return self._counted(self._clock()) - self._last

    @property
    def limit(self) -> float:
        """Seconds without progress after which this phase counts as hung."""
        phase, limits = self.phase, self.limits
        least = limits.least if phase in self._passed else max(limits.first, limits.least)
        return max(least, limits.factor * self._longest.get(phase, 0.0))

    def reset(self) -> None:
        """Forget everything, as in a process that has just started."""
        self.__init__(self._clock)  # type: ignore[misc]

    def renew_lock(self) -> None:
        """In a forked worker: another thread of its parent may have held the lock."""
        self._lock = threading.Lock()


ACTIVITY = Activity()
os.register_at_fork(after_in_child=ACTIVITY.renew_lock)
