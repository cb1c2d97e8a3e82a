"""``status.json``: where a run stands, for scripts and people.

Exit statuses get lost on the way through launchers (``torchrun`` always exits with 1, ``deepspeed`` may exit with 0).
This file does not: it is replaced as a whole, one key to a line, so that ``grep`` can read it as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from alignment.reporting.durable import replace_text

STATUS = "status.json"
STATES = ("starting", "running", "preempted", "stopped", "failed", "finished")
ENDED = STATES[2:]
_LAST_S = 5.0  # how long a write is waited for


def now() -> str:
    """The time of day as ``2026-11-22T18:20:11Z``."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class RunStatus:
    """The content of ``status.json``.

    Attributes:
        state: one of :data:`STATES`.
        signal: what asked the run to stop: ``SIGTERM``, ``SIGUSR1``, ``SIGHUP``, ``SIGINT`` or ``STOP`` (the file);
            None unless it was.
        error: the error's line, of a failed run.
        run: the run's name, the same through all attempts that resume from a checkpoint.
        attempt: how often it was started.
        stalled: attempts of this job in a row, this one included, that have written no checkpoint beyond the one that
            they started from.
        method: ``kto`` …
        host: of the first rank.
        pid: its process.
        world_size: number of ranks.
        job: SLURM's number of the job, or empty.
        restarts: how often SLURM has requeued it.
        phase: what the first rank was doing.
        step: the last completed optimizer step.
        total_steps: of the whole run; 0 while it is not known.
        checkpoint: name of the newest checkpoint, or empty.
        resumed_from: name of the one that this attempt resumed from, or empty.
        started: when this attempt started, in UTC.
        time: when this was written, in UTC.
    """

    state: str = "starting"
    signal: str | None = None
    error: str | None = None
    run: str = ""
    attempt: int = 1
    stalled: int = 1
    method: str = ""
    host: str = ""
    pid: int = 0
    world_size: int = 1
    job: str = ""
    restarts: int = 0
    phase: str = "start"
    step: int = 0
    total_steps: int = 0
    checkpoint: str = ""
    resumed_from: str = ""
    started: str = ""
    time: str = ""

    def text(self) -> str:
        """The file: a JSON object with one key to a line."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def parsed(cls, text: str) -> RunStatus:
        """The status that a file holds; keys of other versions are left out.

        Raises:
            ValueError: it is no status: torn, no JSON, or with a value that is none.
        """
        try:
            found = json.loads(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(found, dict) or found.get("state") not in STATES:
            raise ValueError("it is no status of a run")
        known: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name not in found:
                continue
            value, default = found[field.name], field.default
            kinds = (str, type(None)) if default is None else (type(default),)
            if type(value) not in kinds:
                raise ValueError(f"{field.name} is {value!r}")
            known[field.name] = value
        return cls(**known)


def read_status(folder: Path) -> RunStatus | None:
    """The status in a run's folder; None if there is none.

    Raises:
        ValueError: the file is no status.
        OSError: it cannot be read.
    """
    try:
        return RunStatus.parsed((folder / STATUS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def fail_in_place_of(folder: Path, host: str, pid: int, error: str) -> None:
    """Write into the status of a run whose first rank was killed that it has failed, unless a later attempt has begun.

    Args:
        folder: the output folder.
        host, pid: of that rank.
        error: the error's line.
    """
    with contextlib.suppress(OSError, ValueError):
        status = read_status(folder)
        if status is not None and status.state not in ENDED and (status.host, status.pid) == (host, pid):
            failed = dataclasses.replace(status, state="failed", error=error, time=now())
            replace_text(folder / STATUS, failed.text())


class StatusFile:
    """Keeps ``status.json`` of a run up to date; one process writes it, from several threads.

    The file is written by a thread of its own, which is waited for a few seconds at most: a disk that is full or does
    not answer costs the update, and neither a step nor the end of the process. An end is not written over the status
    of another attempt, which may have taken the folder by then.

    Args:
        folder: the output folder.
        status: with which the run starts.
        clock: in seconds.
    """

    def __init__(self, folder: Path, status: RunStatus, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.status = folder / STATUS, status
        self._clock, self._lock, self._written = clock, threading.Lock(), float("-inf")
        self._closed = threading.Event()
        self._keeper: threading.Thread | None = None
        self._writer: threading.Thread | None = None

    def update(self, *, within: float = 0.0, **changes: Any) -> None:
        """Change fields of the status and write it.

        Args:
            within: do not write if the file is younger than this, in seconds, and the state is as it was.
            **changes: fields of :class:`RunStatus`.
        """
        with self._lock:
            if self.status.state in ENDED:  # the first end counts
                return
            before, self.status = self.status, dataclasses.replace(self.status, **changes, time=now())
            if self.status.state == before.state and self._clock() - self._written < within:
                return
            busy = self._writer is not None and self._writer.is_alive()
            if busy and self.status.state not in ENDED:
                return  # the disk does not answer; what has changed is written once it does
            self._written = self._clock()
            before_it = self._writer if busy else None
            writer = threading.Thread(target=self._write, args=(before_it,), name="status-write", daemon=True)
            self._writer = writer
            writer.start()
        writer.join(_LAST_S)

    def _write(self, after: threading.Thread | None) -> None:
        """Write the status as it is, once the write before it has returned."""
        if after is not None:
            after.join()
        status = self.status
        with contextlib.suppress(OSError):
            if status.state not in ENDED or self._is_ours(status):
                replace_text(self.path, status.text())

    def _is_ours(self, status: RunStatus) -> bool:
        try:
            found = read_status(self.path.parent)
        except ValueError:
            return True  # torn by something else, and better replaced
        return found is None or (found.host, found.pid, found.started) == (status.host, status.pid, status.started)

    def keep(self, every: float, doing: Callable[[], dict[str, Any]]) -> None:
        """Write what ``doing`` returns, fields of the status, again and again until the run has ended.

        Args:
            every: seconds.
            doing: called in a thread.
        """

        def run() -> None:
            while self.status.state not in ENDED and not self._closed.wait(every):
                self.update(within=every, **doing())

        self._keeper = threading.Thread(target=run, name="status", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """Write no more by itself; how the run ends can still be written."""
        self._closed.set()
        if self._keeper is not None:
            self._keeper.join(_LAST_S)
