"""What this process is doing: its phase, its step and its last progress, for the threads that watch it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from alignment.config.options_training import FaultOptions
from alignment.run.status_file import StatusFile

_LONGEST_TICK_S = 2.0  # a longer time between two ticks means that the process was suspended


class Activity:
    """The phase of the main thread, and its progress: a micro-batch, a generated token, a tokenized batch of rows.

    Attributes:
        now: seconds for which this process was watched; they stand still while it is suspended.
        step: the last completed optimizer step.
        limits: how long a phase may go without progress, and a rank without a heartbeat.
        folder: the output folder, once known; set on every rank.
        status: ``status.json`` of the run; set on rank 0.
        at_failure: called on rank 0 after a failure of the run is in the status.
        guarded: whether a command runs, which reports errors and records the end of the run in the status.
    """

    def __init__(self) -> None:
        self.now, self.step = 0.0, 0
        self.limits = FaultOptions()
        self.folder: Path | None = None
        self.status: StatusFile | None = None
        self.at_failure: Callable[[], None] | None = None
        self.guarded = False
        self._phases, self._failed = ["start"], ""
        self._longest: dict[str, float] = {}
        self._passed: set[str] = set()
        self._moved, self._ticked = 0.0, time.monotonic()

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
    def failed(self) -> str:
        """The phase; after an exception, the innermost one that it has left."""
        return self._failed or self.phase

    @property
    def place(self) -> str:
        """Phase and step, for messages; see :attr:`failed`."""
        return f"phase {self.failed}, step {self.step}"

    def in_status(self) -> dict[str, Any]:
        """Phase and step, as fields of ``status.json``."""
        return {"phase": self.phase, "step": self.step}

    @property
    def idle(self) -> float:
        """Seconds since the last progress."""
        return self.now - self._moved

    def tick(self) -> None:
        """Advance the time; called once a second by the watching thread."""
        before, self._ticked = self._ticked, time.monotonic()
        self.now += min(self._ticked - before, _LONGEST_TICK_S)

    def progress(self) -> None:
        """Record that the main thread has made progress."""
        self._longest[self.phase] = max(self._longest.get(self.phase, 0.0), self.idle)
        self._moved = self.now

    @property
    def limit(self) -> float:
        """Seconds without progress after which the phase is considered hung."""
        first = 0.0 if self.phase in self._passed else self.limits.hang_timeout_first
        return max(self.limits.hang_timeout, first, self.limits.hang_factor * self._longest.get(self.phase, 0.0))

    def forget_durations(self) -> None:
        """Treat every phase as the first of its name, as at the start of a run."""
        self._longest, self._passed = {}, set()

    def reset(self) -> None:
        """Reset everything, as in a new process."""
        self.__init__()  # type: ignore[misc]


ACTIVITY = Activity()
