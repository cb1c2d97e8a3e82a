"""``status.json``: the state of a run, for scripts and users.

Launchers do not preserve exit statuses (``torchrun`` always exits with 1, ``deepspeed`` may exit with 0). This file is
replaced atomically and has one key per line, so that ``grep`` can read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from alignment.config.errors import one_line
from alignment.run.durable import replace_text

STATUS = "status.json"
STATES = ("starting", "running", "preempted", "stopped", "failed", "finished")
ENDED = STATES[2:]
TIME = "%Y-%m-%dT%H:%M:%SZ"  # such as 2026-11-22T18:20:11Z
_EVERY_S = 5.0  # between two writes while a run is in progress
_LAST_S = 5.0  # maximum time to wait for the last write


def now() -> str:
    """The current time as ``2026-11-22T18:20:11Z``."""
    return datetime.now(timezone.utc).strftime(TIME)


@dataclass(frozen=True)
class RunStatus:
    """The content of ``status.json``; names are empty and numbers 0 while they are unknown."""

    state: str = "starting"  #: one of :data:`STATES`
    signal: str | None = None  #: what requested the stop: the name of a signal, or ``STOP`` (the file)
    error: str | None = None  #: the error line of a failed run
    run: str = ""  #: the run's identifier, shared by all attempts that resume from its checkpoints
    attempt: int = 1  #: number of the attempt, from 1
    #: number of consecutive attempts of this job, including this one, that ended without a newer checkpoint
    stalled: int = 1
    method: str = ""  #: such as ``kto``
    host: str = ""  #: host name of rank 0
    pid: int = 0  #: process ID of rank 0
    world_size: int = 1  #: number of ranks
    job: str = ""  #: SLURM job ID
    restarts: int = 0  #: number of times SLURM has requeued it
    phase: str = "start"  #: the current phase of rank 0
    step: int = 0  #: the last completed optimizer step
    total_steps: int = 0  #: optimizer steps of the whole run
    checkpoint: str = ""  #: name of the newest checkpoint
    resumed_from: str = ""  #: name of the checkpoint that this attempt resumed from
    started: str = ""  #: when this attempt started, in UTC
    time: str = ""  #: when the file was written, in UTC

    def text(self) -> str:
        """The content of the file: a JSON object with one key per line."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


_CONTENT = TypeAdapter(RunStatus)


def read_status(folder: Path) -> RunStatus | None:
    """Read the status in a run's folder, without unknown keys; None if there is none.

    Raises:
        ValueError: the file is not a valid status.
        OSError: it cannot be read.
    """
    try:
        status = _CONTENT.validate_json((folder / STATUS).read_bytes(), strict=True)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        problem = error.errors()[0]
        raise ValueError(": ".join(map(str, (*problem["loc"], problem["msg"])))) from None
    if status.state not in STATES:
        raise ValueError(f"state is {status.state!r}")
    return status


def next_attempt(folder: Path, resumes: bool, resumed_from: str, **known: Any) -> RunStatus:
    """The first status of a new attempt, in this process; if a resume was requested, it counts earlier attempts.

    ``resumed_from`` and ``known``, such as the method, are fields of :class:`RunStatus`.
    """
    before = None
    try:
        before = read_status(folder) if resumes else None
    except (ValueError, OSError) as error:
        print(f"{folder / STATUS}: cannot be read ({one_line(error)}); attempts are counted from 1", flush=True)
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")
    known |= {"job": job, "restarts": int(restarts) if restarts.isdecimal() else 0, "started": now()}
    known |= {"host": socket.gethostname(), "pid": os.getpid(), "resumed_from": resumed_from}
    if before is not None:
        # A newly submitted job has the full number of attempts without progress again.
        stalls = (before.job, before.resumed_from) == (job, resumed_from)
        known |= {"attempt": before.attempt + 1, "stalled": before.stalled + 1 if stalls else 1}
    return RunStatus(checkpoint=resumed_from, **known)


def fail_in_place_of(folder: Path, host: str, pid: int, error: str) -> None:
    """Record the failure of a run whose rank 0, a process of ``host``, was killed, unless another has started."""
    with contextlib.suppress(OSError, ValueError):
        status = read_status(folder)
        if status is not None and status.state not in ENDED and (status.host, status.pid) == (host, pid):
            failed = dataclasses.replace(status, state="failed", error=error, time=now())
            replace_text(folder / STATUS, failed.text())


class StatusFile:
    """Keeps ``status.json`` up to date; written by one process.

    A thread writes the file: after each change, and every few seconds while the run is in progress, with the fields
    that ``doing`` returns. No step waits for a disk, and the end of a run at most a few seconds. The end is not
    written over the status of another attempt, which may have taken over the folder.
    """

    def __init__(self, folder: Path, status: RunStatus, doing: Callable[[], dict[str, Any]] = dict) -> None:
        self.path, self.status, self._doing = folder / STATUS, status, doing
        self._changed = threading.Condition()
        self._wanted, self._written, self._closed = 1, 0, False
        threading.Thread(target=self._keep, name="status", daemon=True).start()

    def update(self, **changes: Any) -> None:
        """Change fields of the status. Only the end of a run is waited for, and only its first end counts."""
        with self._changed:
            if self.status.state in ENDED:
                return
            self.status = dataclasses.replace(self.status, **changes)
            self._wanted += 1
            self._changed.notify_all()
        if self.status.state in ENDED:
            self.flush()

    def flush(self, seconds: float = _LAST_S) -> bool:
        """Wait until the current status is written; return whether the disk responded in time."""
        with self._changed:
            wanted = self._wanted
            return self._changed.wait_for(lambda: self._written >= wanted, seconds)

    def close(self) -> None:
        """End the periodic writes: nothing is written any more except, later, the end of the run."""
        if self.status.state not in ENDED:
            self._closed = True
            self.update()
            self.flush()

    def _keep(self) -> None:
        while self.status.state not in ENDED or self._written < self._wanted:
            with self._changed:
                self._changed.wait_for(lambda: self._written < self._wanted, None if self._closed else _EVERY_S)
                wanted = self._wanted
                doing = {} if self._closed or self.status.state in ENDED else self._doing()
                status = self.status = dataclasses.replace(self.status, **doing, time=now())
            with contextlib.suppress(OSError):
                if status.state not in ENDED or self._is_ours(status):
                    replace_text(self.path, status.text())
            with self._changed:
                self._written = wanted
                self._changed.notify_all()

    def _is_ours(self, status: RunStatus) -> bool:
        try:
            found = read_status(self.path.parent) or status
        except ValueError:  # damaged
            return True
        return (found.host, found.pid, found.started) == (status.host, status.pid, status.started)
