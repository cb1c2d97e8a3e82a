"""A run as its output folder shows it: while it runs, after its end, and after it was killed. Imports no torch."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError, counted, one_line
from alignment.reporting.formats import gibibytes
from alignment.reporting.log_reading import Log, Record, metrics_of
from alignment.run.lock import holder, is_locked
from alignment.run.status_file import ENDED, STATUS, RunStatus, read_status

LOG, MANIFEST = "log.jsonl", "manifest.json"
LOST, UNKNOWN = "lost", "unknown"  # states in addition to those of status.json
IN_PROGRESS = ("starting", "running")
_RESUME = ("time", "attempt", "step", "checkpoint", "world_size")
_ENDING_S = 60.0  # a run releases its folder before it records its end; later, its process ID may be another's


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint as its manifest describes it, compared with the sizes of its files."""

    name: str
    step: int
    complete: bool = False
    problem: str | None = None  #: why it is incomplete
    bytes: int = 0
    resumable: bool = False  #: whether a run can resume from it

    @property
    def condition(self) -> str:
        """Whether it is complete, in words."""
        return (f"incomplete: {self.problem}", "complete, weights only", "complete")[self.complete + self.resumable]

    @property
    def size(self) -> str:
        """Its size with a unit; empty if unknown."""
        return gibibytes(self.bytes) if self.bytes >= 2**30 / 100 else f"{self.bytes / 1e6:.1f} MB" * self.complete


class RunView:
    """A run as the files in its output folder show it. Unknown values are None or empty."""

    def __init__(self, folder: Path) -> None:
        problems = []
        alive = is_locked(folder) is not False  # without file locks, the file stands for a run until a clean end
        try:
            said = read_status(folder)
        except (OSError, ValueError) as error:
            said = None
            problems.append(f"{STATUS}: cannot be read ({one_line(error)})")
        log = Log(folder / LOG)
        problems += [f"{LOG}: {counted(log.unreadable, 'line')} cannot be read"] if log.unreadable else []
        start, last, rates = log.newest("start"), log.last, log.rates()
        said = said or RunStatus(UNKNOWN, run=start.get("run", ""), method=start.get("method", ""))
        named = (
            (path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir()
        )
        found = sorted(((int(step), path) for step, path in named if step.isdecimal()), reverse=True)
        state = said.state if alive or said.state in (*ENDED, UNKNOWN) or _is_ending(said, folder) else LOST
        step = max(said.step, last.get("step", 0), *(step for step, _ in found[:1]))
        total = said.total_steps or start.get("steps", 0)
        left = max(0, total - step) if state in IN_PROGRESS and total else None

        self.folder, self.log = str(folder), log
        #: what ``status.json`` says, with the newest known step, and ``lost`` and ``unknown`` as further states
        self.status = replace(said, state=state, step=step, total_steps=total)
        self.alive = alive  #: whether a process holds the folder
        self.holder = holder(folder) if alive else ""  #: that process
        self.name: str = start.get("run_name", "")
        self.eta_seconds = left / rates[0] if left is not None and rates[0] else None  #: at the current rate
        self.steps_per_second, self.tokens_per_second = rates  #: over the newest entries of the log
        self.tokens: int | None = last.get("num_tokens")  #: trained on so far
        self.metrics = metrics_of(last)  #: of the newest training entry of the log
        self.metrics_step: int | None = last.get("step")
        self.evaluation = metrics_of(log.evaluation)  #: the newest one
        self.evaluation_step: int | None = log.evaluation.get("step")
        #: time, attempt, step, checkpoint and world_size of each
        self.resumes: list[Record] = [
            {key: one.get(key) for key in _RESUME} for one in log.events if one["event"] == "resume"
        ]
        #: totals of rank 0, after the end of a run
        self.phases: dict[str, Record] = log.newest("start", "resume", "end", "stop").get("phases") or {}
        self.checkpoints = [_read_checkpoint(path, step) for step, path in found]  #: the newest first
        #: checkpoints that are being written, or were at a kill
        self.partial = sorted(path.name for path in folder.glob(".checkpoint-*.partial"))
        reports = [path for name in ("report.html", "report.md") if (path := folder / name).exists()]
        self.report = str(reports[0]) if reports else None  #: its path
        self.problems = problems  #: files that cannot be read

    def to_dict(self) -> dict[str, Any]:
        """The run as a JSON object; the values of the status are among its own, and the keys are stable."""
        own = {name: value for name, value in vars(self).items() if name not in ("log", "status")}
        status, checkpoints = asdict(self.status), [asdict(one) for one in self.checkpoints]
        return {"updated": status.pop("time"), **status, **own, "checkpoints": checkpoints}

    @property
    def sentence(self) -> str:
        """The state in words."""
        status = self.status
        where = f", phase {status.phase}" if status.phase else ""
        process = f"process {status.pid} on {status.host}"
        if status.state == LOST:
            return f"no heartbeat since {utc(status.time)}: {process} is gone{where}"
        if status.state == UNKNOWN:
            return "unknown: there is no readable status.json"
        if status.state in IN_PROGRESS:
            return f"{status.state}: {self.holder or process}{where}"
        by = f" by {status.signal} after step {status.step}" if status.signal else ""
        return f"{status.state}{by}" + (f": {status.error}" if status.error else "")


def read_run(folder: Path) -> RunView:
    """Read the files of a run in its output folder; raise OutputError if it is not the output folder of a run."""
    view = RunView(folder)
    if view.status.state == UNKNOWN and not (view.alive or view.problems or view.log.events or view.checkpoints):
        what = "not the output folder of a run: it has no status.json, no log.jsonl and no checkpoint"
        raise OutputError(f"{folder}: {what if folder.exists() else 'no such folder'}")
    return view


def utc(time: str | None, length: int = 19) -> str:
    """A time of the log or the status as ``2026-11-22 18:20:05 UTC``; empty if unknown."""
    return f"{time[:length].replace('T', ' ')} UTC" if time else ""


def _is_ending(said: RunStatus, folder: Path) -> bool:
    is_here = said.host == socket.gethostname() and Path(f"/proc/{said.pid}").exists()
    return is_here and time.time() - (folder / STATUS).stat().st_mtime < _ENDING_S


def _read_checkpoint(path: Path, step: int) -> CheckpointView:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        sizes = {name: record["size"] for name, record in manifest["files"].items()}
        other = next((name for name, size in sizes.items() if (path / name).stat().st_size != size), None)
        if other is None:
            return CheckpointView(path.name, step, True, None, sum(sizes.values()), manifest["resumable"])
        problem = f"{other}: does not have {sizes[other]} bytes"
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        problem = f"cannot be read ({one_line(error)})"
    return CheckpointView(path.name, step, problem=problem)
