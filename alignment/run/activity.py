"""What this process is doing: its phase, its step and its last progress, for the threads that watch it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from alignment.reporting.status_file import StatusFile

_GAP_S = 3.0  # longer than the interval between two ticks


@dataclass(frozen=True)
class Limits:
    """How long a phase may go without progress, in seconds; see :meth:`Activity.limit`.

    Attributes:
        least: the minimum, whatever was measured before.
        factor: multiple of the longest time without progress measured in the phase so far.
        first: the minimum in the first pass through the phase.
        silence: how long a rank may go without a heartbeat.
    """

    least: float = 600.0
    factor: float = 5.0
    first: float = 3600.0
    silence: float = 25.0


class Activity:
    """The phase of the main thread, and its progress.

    Written by the main thread and read by others. Progress is anything that cannot happen while a rank hangs: entering
    or leaving a phase, a micro-batch, a generated token, a tokenized batch of rows. One watching thread calls
    :meth:`tick` continuously; a long gap between two ticks means that the process itself was suspended.

    Args:
        clock: in seconds.

    Attributes:
        step: the last completed optimizer step.
        limits: how long a phase may go without progress.
        count: how often the main thread has made progress.
        folder: the output folder, once known; set on every rank.
        status: ``status.json`` of the run; set on rank 0.
        at_failure: called on rank 0 after a failure of the run is in the status.
        guarded: whether a command runs, which reports errors and records the end of the run in the status.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.step, self.limits, self.count = 0, Limits(), 0
        self._clock, self._lock = clock, threading.Lock()
        self._phases, self._failed = ["start"], ""
        self._longest: dict[str, float] = {}
        self._passed: set[str] = set()
        self._last = clock()
        self._tick: float | None = None
        self.folder: Path | None = None
        self.status: StatusFile | None = None
        self.at_failure: Callable[[], None] | None = None
        self.guarded = False

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Set the phase to ``phase`` within this context."""
        self.progress()
        self._phases.append(phase)
        self._failed = ""
        try:
            yield
            self._passed.add(phase)
        except BaseException:
            self._failed = self._failed or phase
            raise
        finally:
            self.progress()
            self._phases.pop()

    @property
    def phase(self) -> str:
        """The innermost phase; ``start`` before the first one."""
        return self._phases[-1]

    @property
    def place(self) -> str:
        """Phase and step, for messages; after an exception, the innermost phase that it has left."""
        return f"phase {self._failed or self.phase}, step {self.step}"

    def progress(self) -> None:
        """Record that the main thread has made progress."""
        now = self._clock()
        with self._lock:
            phase = self.phase
            self._longest[phase] = max(self._longest.get(phase, 0.0), self._counted(now) - self._last)
            self._last, self.count = now, self.count + 1

    def begin_watch(self) -> None:
        """Start to count: the time before, without a watching thread, is not time without progress."""
        with self._lock:
            self._last, self._tick = self._clock(), None

    def tick(self) -> float:
        """Called several times a second by the watching thread.

        Returns:
            Seconds for which the whole process was suspended (a stopped job, a sleeping machine), on the first call
            afterwards. They do not count as time without progress.
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
        """The time up to which to count: the main thread may resume before the watcher notices the suspension."""
        stood_still = self._tick is not None and now - self._tick > _GAP_S
        return max(self._tick, self._last) if stood_still and self._tick is not None else now

    @property
    def idle(self) -> float:
        """Seconds since the last progress."""
        with self._lock:
            return self._counted(self._clock()) - self._last

    @property
    def limit(self) -> float:
        """Seconds without progress after which the phase is considered hung."""
        phase, limits = self.phase, self.limits
        least = limits.least if phase in self._passed else max(limits.first, limits.least)
        return max(least, limits.factor * self._longest.get(phase, 0.0))

    def reset(self) -> None:
        """Reset everything, as in a new process."""
        self.__init__(self._clock)  # type: ignore[misc]

    def renew_lock(self) -> None:
        """Replace the lock in a forked worker: another thread of the parent may have held it."""
        self._lock = threading.Lock()


ACTIVITY = Activity()
os.register_at_fork(after_in_child=ACTIVITY.renew_lock)
