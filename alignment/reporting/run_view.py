"""A run as its output folder shows it: while it runs, after its end, and after it was killed. Imports no torch."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError, counted, one_line
from alignment.reporting.formats import in_order
from alignment.run.lock import holder, is_locked
from alignment.run.status_file import ENDED, STATUS, TIME, RunStatus, read_status

LOG, MANIFEST = "log.jsonl", "manifest.json"
LOST, UNKNOWN = "lost", "unknown"  # states in addition to those of status.json
IN_PROGRESS = ("starting", "running")
_RESUME = ("time", "attempt", "step", "checkpoint", "world_size")
_BOOKKEEPING = ("step", "epoch", "num_tokens", "num_input_tokens_seen", "tokens_per_second", "time")
_RECENT = 50  # entries used for rates
_ENDING_S = 60.0  # a run releases its folder before it records its end; later, its process ID may be another's
# Types of values of the log that are used in computations.
_TYPES: dict[str, Any] = {"step": int, "time": str, "models": str, "data": list, "phases": dict, "versions": dict}
_TYPES |= dict.fromkeys(("num_tokens", "train_runtime"), (int, float))

Record = dict[str, Any]


class Log:
    """The complete lines of ``log.jsonl``, which may be missing. Raises OSError if it exists and cannot be read.

    Attributes:
        records: the JSON objects in it with valid values, in order.
        unreadable: the number of other lines.
        events: the lines about the run itself: ``start``, ``resume``, ``end`` and others with ``event``.
        entries: the metrics of training steps and of evaluations.
        last: the newest training entry; empty if there is none, as is the next.
        totals: the entry with the totals of the run, such as ``train_runtime``.
    """

    def __init__(self, path: Path) -> None:
        found = read_lines(path)
        self.records = [record for record in found if _is_record(record)]
        self.unreadable = len(found) - len(self.records)
        self.events = [record for record in self.records if "event" in record]
        self.entries = [one for one in self.records if not {"event", "train_runtime"} & one.keys()]
        self._training = [entry for entry in self.entries if "num_tokens" in entry]
        self.last = self._training[-1] if self._training else {}
        self.totals = next((record for record in reversed(self.records) if "train_runtime" in record), {})

    @property
    def ended(self) -> Record:
        """The ``end`` event if the newest attempt finished, else an empty one."""
        newest = self.newest("start", "resume", "end")  # an upload may follow it
        return newest if newest.get("event") == "end" else {}

    def newest(self, *events: str) -> Record:
        """The newest event with one of these names; empty if there is none."""
        return next((event for event in reversed(self.events) if event["event"] in events), {})

    def evaluation(self, step: int | None = None) -> Record:
        """The evaluation after a step, by default the newest, of all sets, each of which has an entry of its own."""
        found = [entry for entry in self.entries if "num_tokens" not in entry]
        step = found[-1].get("step") if found and step is None else step
        return {name: value for entry in found if entry.get("step") == step for name, value in entry.items()}

    def rates(self) -> tuple[float | None, float | None]:
        """Steps and tokens per second over the newest entries of the newest attempt, or over a run that has ended."""
        if self.ended and self.totals:
            seconds, steps = self.totals["train_runtime"], self.totals.get("train_steps_per_second")
            return steps, self.last.get("num_tokens", 0) / seconds or None
        since = self.newest("start", "resume").get("time", "")
        recent = [entry for entry in self._training if entry["time"] >= since][-_RECENT:]
        seconds = seconds_of(recent[-1]["time"]) - seconds_of(recent[0]["time"]) if recent else 0.0
        if seconds <= 0:
            return None, None
        steps, tokens = ((recent[-1][key] - recent[0][key]) / seconds for key in ("step", "num_tokens"))
        return steps or None, tokens or None


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint as its manifest describes it, compared with the sizes of its files."""

    name: str
    step: int
    complete: bool = False
    problem: str | None = None  #: why it is incomplete
    bytes: int = 0
    resumable: bool = False  #: whether a run can resume from it
    written: str = ""  #: when its manifest was written, in UTC

    @property
    def condition(self) -> str:
        """Whether it is complete, in words."""
        return (f"incomplete: {self.problem}", "complete, weights only", "complete")[self.complete + self.resumable]


class RunView:
    """A run as the files in its output folder show it. Unknown values are None or empty."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.alive = is_locked(folder) is not False  #: whether a process holds it; also True without file locks
        self.holder = holder(folder) if self.alive else ""  #: that process
        self.problems: list[str] = []  #: files that cannot be read
        self.log = log = Log(folder / LOG)
        start, evaluation, rates = log.newest("start"), log.evaluation(), log.rates()
        said = RunStatus(UNKNOWN, run=start.get("run", ""), method=start.get("method", ""))
        try:
            said = read_status(folder) or said
        except (OSError, ValueError) as error:
            self.problems.append(f"{STATUS}: cannot be read ({one_line(error)})")
        if log.unreadable:
            self.problems.append(f"{LOG}: {counted(log.unreadable, 'line')} cannot be read")
        steps = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*") if path.is_dir()}
        saved = sorted(((int(step), path) for path, step in steps.items() if step.isdecimal()), reverse=True)
        step = max(said.step, log.last.get("step", 0), *(step for step, _ in saved[:1]))
        total = said.total_steps or start.get("steps", 0)
        is_known = self.alive or said.state in (*ENDED, UNKNOWN) or _is_ending(said, folder)
        #: what ``status.json`` says, with the newest known step, and ``lost`` and ``unknown`` as further states
        self.status = replace(said, state=said.state if is_known else LOST, step=step, total_steps=total)
        self.name: str = start.get("run_name", "")
        self.steps_per_second, self.tokens_per_second = rates  #: over the newest entries of the log
        left = max(0, total - step) if self.status.state in IN_PROGRESS and total else None
        self.eta_seconds = left / rates[0] if left is not None and rates[0] else None  #: at the current rate
        self.tokens: int | None = log.last.get("num_tokens")  #: trained on so far
        self.metrics, self.metrics_step = metrics_of(log.last), log.last.get("step")  #: the newest of training
        self.evaluation, self.evaluation_step = metrics_of(evaluation), evaluation.get("step")  #: the newest
        resumes = [event for event in log.events if event["event"] == "resume"]
        #: time, attempt, step, checkpoint and world_size of each
        self.resumes: list[Record] = [{key: event.get(key) for key in _RESUME} for event in resumes]
        #: totals of rank 0, after the end of a run
        self.phases: dict[str, Record] = log.newest("start", "resume", "end", "stop").get("phases") or {}
        self.checkpoints = [_read_checkpoint(path, step) for step, path in saved]  #: the newest first
        #: checkpoints that are being written, or were at a kill
        self.partial = sorted(path.name for path in folder.glob(".checkpoint-*.partial"))
        #: why callbacks ended it before its last step, and the step of its weights with ``load_best_model_at_end``
        self.ended_early, self.weights_step = log.ended.get("ended_early"), log.ended.get("weights_step")
        reports = [str(path) for name in ("report.html", "report.md") if (path := folder / name).exists()]
        self.report = reports[0] if reports else None  #: its path

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
        if status.state == "finished" and self.ended_early:
            return f"finished early after step {status.step} of {status.total_steps}: {self.ended_early}"
        return f"{status.state}{by}" + (f": {status.error}" if status.error else "")


def runs_in(folder: Path) -> list[Path]:
    """The output folders of runs in a folder, by name; the folder itself if it is one, or has none."""
    names = (STATUS, LOG, "checkpoint-*")
    inner = {path.parent for name in names for path in (*folder.glob(name), *folder.glob(f"[!.]*/{name}"))}
    return [folder] if folder in inner or not inner else sorted(inner, key=lambda path: in_order(path.name))


def read_run(folder: Path) -> RunView:
    """Read the files of a run in its output folder; raise OutputError if it is not the output folder of a run."""
    if not folder.is_dir():
        raise OutputError(f"{folder}: no such folder")
    view = RunView(folder)
    has_files = view.problems or view.checkpoints or (folder / LOG).exists()
    if view.status.state == UNKNOWN and not (view.alive or has_files):
        raise OutputError(f"{folder}: not the output folder of a run: no status.json, no log.jsonl and no checkpoint")
    return view


def _is_ending(said: RunStatus, folder: Path) -> bool:
    is_here = said.host == socket.gethostname() and Path(f"/proc/{said.pid}").exists()
    return is_here and time.time() - (folder / STATUS).stat().st_mtime < _ENDING_S


def _read_checkpoint(path: Path, step: int) -> CheckpointView:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        sizes = {name: record["size"] for name, record in manifest["files"].items()}
        other = next((name for name, size in sizes.items() if (path / name).stat().st_size != size), None)
        if other is None:
            written = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime, timezone.utc).strftime(TIME)
            return CheckpointView(path.name, step, True, None, sum(sizes.values()), manifest["resumable"], written)
        problem = f"{other}: does not have {sizes[other]} bytes"
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        problem = f"cannot be read ({one_line(error)})"
    return CheckpointView(path.name, step, problem=problem)


def _is_record(record: Record) -> bool:
    """Whether it is an event, totals, or an entry of a step, with values of the right types."""
    try:
        seconds_of(record.get("time", "1970-01-01"))
    except (ValueError, AttributeError):
        return False
    typed = all(isinstance(record[name], kind) for name, kind in _TYPES.items() if name in record)
    return typed and bool({"event", "train_runtime", "step"} & record.keys())


def metrics_of(record: Record) -> Record:
    """The metrics of an entry, without step, epoch, time and token counts."""
    return {name: value for name, value in record.items() if name not in _BOOKKEEPING}


def seconds_of(time: str) -> float:
    """Parse a time of the log or of ``status.json`` into seconds since 1970."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def utc(time: str | None, length: int = 19) -> str:
    """A time of the log or the status as ``2026-11-22 18:20:05 UTC``; empty if unknown."""
    return f"{time[:length].replace('T', ' ')} UTC" if time else ""


def read_lines(path: Path) -> list[Record]:
    """The JSON object in each complete line of a file, which may be missing; empty for a line that is not one."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # the last line may be incomplete
    return [_parsed(line) for line in lines if line.strip()]


def read_object(path: Path, hook: Callable[[Record], Record] | None = None) -> Record:
    """Read a JSON object, with ``hook`` applied to all objects in it; return an empty one if this fails."""
    try:
        return _parsed(path.read_bytes(), hook)
    except OSError:
        return {}


def _parsed(text: bytes, hook: Callable[[Record], Record] | None = None) -> Record:
    """A JSON object; empty if the text is not one."""
    try:
        found = json.loads(text, object_hook=hook)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
