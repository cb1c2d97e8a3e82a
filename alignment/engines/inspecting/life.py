"""Whether the process of a run is still alive.

The lock of its output folder tells. On a file system without locks only changes do: of the files that a run writes.
They are timed with the observer's clock, since the clocks of two hosts may differ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from alignment.reporting.log_reading import seconds_of
from alignment.reporting.run_lock import holder, is_locked
from alignment.reporting.status_file import STATUS, RunStatus

SILENT_S = 20.0  # longer than the interval of status.json
_CLOCKS_DIFFER_S = 30.0
_HEARTBEATS = (STATUS, "log.jsonl")


@dataclass(frozen=True)
class Life:
    """What is known about a run's process.

    Attributes:
        alive: None as long as it has to be watched.
        owner: the process that holds the output folder, if any.
        reason: how it is known that the process is gone.
    """

    alive: bool | None
    owner: str = ""
    reason: str = ""


class Pulse:
    """Watches for heartbeats of the process that writes to an output folder.

    Args:
        folder: the output folder.
        clock: the observer's, in seconds.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self._clock = folder, clock
        self._seen: tuple[object, ...] | None = None
        self._since = 0.0
        self._changed = False

    def look(self) -> Life:
        """What is known so far; each call may know more than the previous one."""
        locked, owner = is_locked(self.folder), holder(self.folder)
        if locked is not None:
            return Life(locked, owner, "" if locked else f"{owner or 'its process'} is gone")
        return self._watched(owner, tuple(_stamp(self.folder / name) for name in _HEARTBEATS))

    def _watched(self, owner: str, seen: tuple[object, ...]) -> Life:
        now = self._clock()
        if seen != self._seen:
            self._changed = self._seen is not None
            self._seen, self._since = seen, now
        silent = now - self._since
        if silent >= SILENT_S:
            return Life(False, owner, f"nothing was written for {silent:.0f} s")
        return Life(True if self._changed else None, owner)


def last_heartbeat(folder: Path) -> float | None:
    """When the run last wrote to its folder, by the file system's clock, in seconds since 1970."""
    times = [stamp[0] for name in _HEARTBEATS if (stamp := _stamp(folder / name)) is not None]
    return max(times, default=None)


def clocks(folder: Path, status: RunStatus, now: Callable[[], float] = time.time) -> str | None:
    """A sentence if two of the clocks involved visibly differ, else None.

    The time in ``status.json`` is from the clock of the run's host; its modification time is from the file system's.
    """
    said, stamp = seconds_of(status.time), _stamp(folder / STATUS)
    if said is None or stamp is None:
        return None
    for ahead, whose, other in (
        (said - stamp[0], f"the clock of {status.host or 'the run'}", "that of the file system"),
        (max(0.0, stamp[0] - now()), "the clock of the file system", "this machine's"),
    ):
        if abs(ahead) >= _CLOCKS_DIFFER_S:
            return f"{whose} is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} {other}"
    return None


def _stamp(path: Path) -> tuple[float, int] | None:
    """Modification time and size of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime, found.st_size
