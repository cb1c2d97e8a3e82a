"""``status.json`` of a run: the current attempt, and its end if no guard of a command records it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignment.config.errors import one_line
from alignment.run.activity import ACTIVITY
from alignment.run.console import tell
from alignment.run.ending import Ending, ending_of, record
from alignment.run.status_file import STATUS, RunStatus, StatusFile, now, read_status


def begin_status(folder: Path, resumes: bool, **known: Any) -> None:
    """Write the status of a new attempt on the first rank, which then keeps it up to date.

    If a resume was requested, earlier attempts are counted. ``known`` are ``method``, ``world_size`` and
    ``resumed_from`` of :class:`.RunStatus`.
    """
    before = RunStatus(attempt=0, stalled=0)
    try:
        before = (read_status(folder) if resumes else None) or before
    except (ValueError, OSError) as error:
        tell(f"{folder / STATUS}: cannot be read ({one_line(error)}); attempts are counted from 1")
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")
    # A newly submitted job has the full number of attempts without progress again.
    stalls = before.job == job and before.resumed_from == known["resumed_from"]
    ACTIVITY.step = 0
    known |= {"attempt": before.attempt + 1, "stalled": 1 + (before.stalled if stalls else 0)}
    known |= {"job": job, "restarts": int(restarts) if restarts.isdecimal() else 0, "started": now()}
    known |= {"host": socket.gethostname(), "pid": os.getpid(), "checkpoint": known["resumed_from"]}
    ACTIVITY.status = StatusFile(folder, RunStatus(**known), lambda: {"phase": ACTIVITY.phase, "step": ACTIVITY.step})
    ACTIVITY.status.flush()


@contextlib.contextmanager
def ending_in_status() -> Iterator[None]:
    """Record in the status how the body ends, and write the report of a failure, unless a guard does."""
    if ACTIVITY.guarded:
        yield
        return
    ending = Ending("", code=0)
    try:
        yield
    except BaseException as error:
        ending = ending_of(error)
        raise
    finally:
        record(ending)  # no effect if the end has been recorded
        if ACTIVITY.status is not None:
            ACTIVITY.status.close()
        ACTIVITY.status = ACTIVITY.at_failure = None
