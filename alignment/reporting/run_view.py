"""A run as its output folder shows it: while it runs, after its end, and after it was killed. Imports no torch."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError, counted, one_line
from alignment.reporting.log_reading import Log, Record, metrics_of, whole
from alignment.reporting.report import gibibytes
from alignment.reporting.run_lock import holder, is_locked
from alignment.reporting.status_file import ENDED, STATUS, RunStatus, read_status

LOG, MANIFEST = "log.jsonl", "manifest.json"
LOST, UNKNOWN = "lost", "unknown"  # states in addition to those of status.json
IN_PROGRESS = ("starting", "running")
_RESUME = ("time", "attempt", "step", "checkpoint", "world_size")


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


@dataclass(frozen=True)
class RunView:
    """A run as its files show it. Unknown values are None or empty."""

    folder: str
    log: Log
    status: RunStatus  #: what ``status.json`` says, with the newest known step, and ``lost`` and ``unknown`` as states
    alive: bool = False  #: whether a process holds the folder
    holder: str = ""  #: that process
    name: str = ""  #: ``run_name``
    eta_seconds: float | None = None  #: until the last step, at the current rate
    steps_per_second: float | None = None  #: over the newest entries of the log
    tokens_per_second: float | None = None
    tokens: int | None = None  #: trained on so far
    metrics: Record = field(default_factory=dict)  #: of the newest training entry of the log
    metrics_step: int | None = None
    evaluation: Record = field(default_factory=dict)  #: the newest one
    evaluation_step: int | None = None
    resumes: list[Record] = field(default_factory=list)  #: time, attempt, step, checkpoint and world_size of each
    phases: dict[str, Record] = field(default_factory=dict)  #: totals of rank 0, after the end of a run
    checkpoints: list[CheckpointView] = field(default_factory=list)  #: the newest first
    partial: list[str] = field(default_factory=list)  #: checkpoints that are being written, or were at a kill
    report: str | None = None  #: its path
    problems: list[str] = field(default_factory=list)  #: files that cannot be read

    def to_dict(self) -> dict[str, Any]:
        """The run as a JSON object; the values of the status are among its own, and the keys are stable."""
        own = {name: value for name, value in vars(self).items() if name not in ("log", "status")}
        status, checkpoints = asdict(self.status), [asdict(one) for one in self.checkpoints]
        return {"updated": status.pop("time"), **status, **own, "checkpoints": checkpoints}

    @property
    def sentence(self) -> str:
        """The state in words."""
        status = self.status
        where = f", phase {status.phase}" if status.phase and status.state in ("running", LOST) else ""
        if status.state == LOST:
            return f"no heartbeat since {utc(status.time)}: process {status.pid} on {status.host} is gone{where}"
        if status.state == UNKNOWN:
            return "unknown: there is no readable status.json"
        if status.state in IN_PROGRESS:
            return f"{status.state}: {self.holder or f'process {status.pid} on {status.host}'}{where}"
        by = f" by {status.signal} after step {status.step}" if status.signal else ""
        return f"{status.state}{by}" + (f": {status.error}" if status.error else "")


def utc(time: str | None, length: int = 19) -> str:
    """A time of the log or the status as ``2026-11-22 18:20:05 UTC``; empty if unknown."""
    return f"{time[:length].replace('T', ' ')} UTC" if time else ""


def read_run(folder: Path) -> RunView:
    """Read the files of a run in its output folder; raise OutputError if it is not the output folder of a run."""
    said, problems = None, list[str]()
    # Without file locks, the file stands for a run until a clean end.
    alive = is_locked(folder) is not False  # a run writes its end before it releases the folder
    try:
        said = read_status(folder)
    except (OSError, ValueError) as error:
        problems.append(f"{STATUS}: cannot be read ({one_line(error)})")
    alive = alive or is_locked(folder) is not False  # a run may have begun in between
    log, checkpoints = Log(folder / LOG), _read_checkpoints(folder)
    rates, start = log.rates(), log.newest("start")
    problems += [f"{LOG}: {counted(log.unreadable, 'line')} cannot be read"] if log.unreadable else []
    if not (said or problems or log.events or checkpoints or alive):
        what = "not the output folder of a run: it has no status.json, no log.jsonl and no checkpoint"
        raise OutputError(f"{folder}: {what if folder.exists() else 'no such folder'}")
    said = said or RunStatus(UNKNOWN, run=str(start.get("run") or ""), method=str(start.get("method") or ""))
    status = replace(
        said,
        state=said.state if alive or said.state in (*ENDED, UNKNOWN) or _is_ending(said, folder) else LOST,
        step=max(said.step, whole(log.last.get("step")) or 0, *(one.step for one in checkpoints[:1])),
        total_steps=said.total_steps or whole(start.get("steps")) or 0,
    )
    left = max(0, status.total_steps - status.step) if status.state in IN_PROGRESS and status.total_steps else None
    return RunView(
        folder=str(folder),
        log=log,
        status=status,
        alive=alive,
        holder=holder(folder) if alive else "",
        name=str(start.get("run_name") or ""),
        eta_seconds=left / rates.steps if left is not None and rates.steps else None,
        steps_per_second=rates.steps,
        tokens_per_second=rates.tokens,
        tokens=whole(log.last.get("num_tokens")),
        metrics=metrics_of(log.last),
        metrics_step=whole(log.last.get("step")),
        evaluation=metrics_of(log.evaluation),
        evaluation_step=whole(log.evaluation.get("step")),
        resumes=[{key: event.get(key) for key in _RESUME} for event in log.events if event.get("event") == "resume"],
        phases=log.newest("start", "resume", "end", "stop").get("phases") or {},
        checkpoints=checkpoints,
        partial=sorted(path.name for path in folder.glob(".checkpoint-*.partial")),
        report=next(map(str, [*folder.glob("report.html"), *folder.glob("report.md")]), None),
        problems=problems,
    )


def _is_ending(said: RunStatus, folder: Path) -> bool:
    """Whether the process of a run is still there that has just released its folder and not recorded its end yet."""
    is_here = said.host == socket.gethostname() and Path(f"/proc/{said.pid}").exists()
    return is_here and time.time() - (folder / STATUS).stat().st_mtime < 60  # later, it may be another process


def _read_checkpoints(folder: Path) -> list[CheckpointView]:
    """The checkpoints in an output folder, the newest first, compared with their manifests by size."""
    named = ((path.name.removeprefix("checkpoint-"), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    found = sorted(((int(step), path) for step, path in named if step.isdecimal()), reverse=True)
    return [_read_checkpoint(path, step) for step, path in found]


def _read_checkpoint(path: Path, step: int) -> CheckpointView:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        sizes = {name: record["size"] for name, record in manifest["files"].items()}
        other = next((name for name, size in sizes.items() if (path / name).stat().st_size != size), None)
        if other is None:
            return CheckpointView(path.name, step, True, None, sum(sizes.values()), bool(manifest["resumable"]))
        problem = f"{other}: does not have {sizes[other]} bytes"
    except OSError as error:
        problem = f"{Path(error.filename).relative_to(path)}: {error.strerror}"
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        problem = f"{MANIFEST}: cannot be read ({one_line(error)})"
    return CheckpointView(path.name, step, problem=problem)
