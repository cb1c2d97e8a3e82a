"""``status.json`` of a run: the current attempt, and its end if no guard of a command writes it."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from alignment.config.errors import one_line
from alignment.reporting.status_file import STATUS, RunStatus, StatusFile, now, read_status
from alignment.run.activity import ACTIVITY
from alignment.run.ranks import world_size
from alignment.run.stop import RunStopped
from alignment.training.run_page import write_page

_EVERY_S = 5.0


def begin_status(
    folder: Path, method: str, resumed_from: str | None, resumes: bool, tell: Callable[[str], None]
) -> None:
    """Write the status of a new attempt on the first rank, which then keeps it up to date.

    Args:
        folder: the output folder.
        method: the run's method.
        resumed_from: name of the checkpoint that it resumes from; None if it starts from scratch.
        resumes: whether a resume was requested; earlier attempts are then counted.
        tell: prints a line.
    """
    before = _earlier(folder, tell) if resumes else None
    job, restarts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")
    # Restarts within this job; a newly submitted job has the full number of attempts again.
    stalls = before is not None and before.job == job and before.resumed_from == (resumed_from or "")
    _finish_earlier_run(folder)
    ACTIVITY.step = 0
    status = RunStatus(
        attempt=before.attempt + 1 if before else 1,
        stalled=before.stalled + 1 if before and stalls else 1,
        method=method,
        host=socket.gethostname(),
        pid=os.getpid(),
        world_size=world_size(),
        job=job,
        restarts=int(restarts) if restarts.isdecimal() else 0,
        resumed_from=resumed_from or "",
        checkpoint=resumed_from or "",
        started=now(),
    )
    ACTIVITY.status = StatusFile(folder, status)
    ACTIVITY.status.update()
    ACTIVITY.status.keep(_EVERY_S, _doing)
    ACTIVITY.at_failure = functools.partial(write_page, folder, tell)


def _finish_earlier_run(folder: Path) -> None:
    """Record the end of a run that this process has completed in another folder: a guard records that of the last."""
    earlier = ACTIVITY.status
    if earlier is not None and earlier.path.parent != folder and 0 < earlier.status.total_steps <= earlier.status.step:
        earlier.update(state="finished")


def _earlier(folder: Path, tell: Callable[[str], None]) -> RunStatus | None:
    try:
        return read_status(folder)
    except (ValueError, OSError) as error:
        tell(f"{folder / STATUS}: cannot be read ({one_line(error)}); attempts are counted from 1")
        return None


def _doing() -> dict[str, Any]:
    return {"phase": ACTIVITY.phase, "step": ACTIVITY.step}


@contextlib.contextmanager
def ending_in_status() -> Iterator[None]:
    """Write how the body ends to the status, unless a guard does."""
    if ACTIVITY.guarded:
        yield
        return
    end, failed = dict[str, Any](state="finished"), False
    try:
        yield
    except BaseException as error:
        end = {"state": "failed", "error": one_line(error)}
        if isinstance(error, KeyboardInterrupt):
            end = {"state": "stopped", "signal": "SIGINT"}
        elif isinstance(error, RunStopped):
            end = {"state": error.reason.state, "signal": error.reason.name}
        failed = not isinstance(error, RunStopped)  # of a run that was stopped, the report is there already
        raise
    finally:
        if ACTIVITY.status is not None:
            ACTIVITY.status.update(**end)  # already written for a run that was stopped
            ACTIVITY.status.close()
        if failed and ACTIVITY.at_failure is not None:
            ACTIVITY.at_failure()
        ACTIVITY.status = ACTIVITY.folder = ACTIVITY.at_failure = None
