"""The state of a run, read from its output folder: while it runs, after its end, and after it was killed."""

from __future__ import annotations

import contextlib
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.manifest import MANIFEST
from alignment.config.errors import OutputError, counted, listing, one_line
from alignment.engines.inspecting.checkpoints import CheckpointReader, CheckpointView
from alignment.engines.inspecting.life import Life, Pulse, clocks, last_heartbeat
from alignment.engines.inspecting.view import LOST, UNKNOWN, RunView
from alignment.reporting.log_reading import LogReader, Record, metrics_of, number
from alignment.reporting.run_lock import LOCK
from alignment.reporting.status_file import ENDED, STATUS, RunStatus, read_status

_LOG, _REPORTS = "log.jsonl", ("report.html", "report.md")
_STATE = "run_state-00000.json"  # of the first rank, in a checkpoint
_LARGEST_STATE = 64 * 2**20
_LARGEST_COUNT = 2**53


class RunReader:
    """Reads an output folder, as often as needed.

    Args:
        folder: the output folder.
        read_all: also compare the contents of checkpoints with their checksums.
        history: keep all entries of the log, in ``log.records``.

    Attributes:
        log: the reader of ``log.jsonl``.

    Raises:
        OutputError: it is not the output folder of a run.
    """

    def __init__(self, folder: Path, *, read_all: bool = False, history: bool = False) -> None:
        _check_folder(folder)
        self.folder = folder
        self.log, self._pulse = LogReader(folder / _LOG, history=history), Pulse(folder)
        self._checkpoints = CheckpointReader(folder, read_all=read_all)
        self._phases: dict[str, dict[str, Record]] = {}

    def read(self) -> RunView:
        """The current state."""
        problems: list[str] = []
        status, life = self._status_and_life(problems)
        try:
            self.log.read()
        except OSError as error:
            problems.append(f"{_LOG}: cannot be read ({error.strerror or error})")
        if self.log.unreadable:
            problems.append(f"{_LOG}: {counted(self.log.unreadable, 'line')} cannot be read")
        found = self._checkpoints.views()
        state, reason = self._state(status, life)
        return RunView(
            folder=str(self.folder),
            state=state,
            reason=reason,
            last_heartbeat=_text_of(last_heartbeat(self.folder)),
            alive=life.alive,
            holder="" if life.alive is False else life.owner,
            checkpoints=found,
            partial=self._checkpoints.being_written(),
            report=next((str(self.folder / name) for name in _REPORTS if (self.folder / name).is_file()), None),
            notes=[said for said in [status and life.alive and clocks(self.folder, status)] if said],
            problems=problems,
            **self._identity(status, found),
            **self._progress(status, state, found),
            **self._phase_times(found),
        )

    def _status_and_life(self, problems: list[str]) -> tuple[RunStatus | None, Life]:
        """A consistent ``status.json`` and process state: a run writes its end there before it releases the folder."""
        for _ in range(3):
            status, problem = _read(self.folder)
            life = self._life(status)
            if life.alive is not False or _read(self.folder)[0] == status:
                break
        problems += [problem] if problem else []
        return status, life

    def _life(self, status: RunStatus | None) -> Life:
        """Do not wait for a run that has ended, or that has neither status nor lock."""
        life = self._pulse.look()
        says_so = status is not None and status.state not in ENDED
        holds = status is None and self.log.ended is None and (self.folder / LOCK).exists()
        return life if life.alive is not None or says_so or holds else Life(False, life.owner)

    def _state(self, status: RunStatus | None, life: Life) -> tuple[str, str]:
        if status is not None and status.state in ENDED:
            return status.state, ""
        if life.alive is not False:
            # Not the process of status.json: the next attempt, which has not written its own status yet.
            if status is None:
                return "running" if self.log.events else "starting", ""
            another = bool(life.owner) and not life.owner.startswith(f"process {status.pid} on ")
            return "starting" if another else status.state, ""
        if status is None and (not life.owner or self.log.ended is not None):
            return "finished" if self.log.ended is not None else UNKNOWN, ""
        return LOST, life.reason

    def _identity(self, status: RunStatus | None, found: list[CheckpointView]) -> dict[str, Any]:
        """The run's identity and process: from the status or, without one, from the log."""
        start, begun = self.log.newest("start"), self.log.newest("start", "resume")
        if status is None:
            return {
                "method": _text(start.get("method")),
                "run": _text(begun.get("run")) or next((one.run for one in found if one.run), ""),
                "name": _text(start.get("run_name")),
                "attempt": _int(begun.get("attempt")),
                "world_size": _int(begun.get("world_size")),
            }
        names = (
            *("signal", "error", "method", "run", "attempt", "stalled", "host", "pid", "world_size", "job"),
            *("restarts", "phase", "started"),
        )
        values = {name: getattr(status, name) for name in names}
        return {**values, "name": _text(start.get("run_name")), "updated": status.time}

    def _progress(self, status: RunStatus | None, state: str, found: list[CheckpointView]) -> dict[str, Any]:
        log, last, evaluation = self.log, self.log.last, self.log.evaluation
        logged = _int(last.get("step"))
        steps = [logged, None if status is None else status.step, found[0].step if found else None]
        step = max((one for one in steps if one is not None), default=None)
        totals = (
            *(() if status is None else (status.total_steps,)),
            *(one.total_steps for one in found),
            _int(log.newest("start").get("steps")),
        )
        total = next((one for one in totals if one), None)
        rates = log.rates()
        goes_on = state in ("starting", "running") and total is not None and step is not None and rates.steps
        return {
            "step": step,
            "total_steps": total,
            "eta_seconds": max(0, total - step) / rates.steps if goes_on else None,  # type: ignore[operator]
            "steps_per_second": rates.steps,
            "tokens_per_second": rates.tokens,
            "tokens": _int(last.get("num_tokens")),
            "metrics": metrics_of(last),
            "metrics_step": logged,
            "evaluation": metrics_of(evaluation),
            "evaluation_step": _int(evaluation.get("step")),
            "resumes": [
                {name: event.get(name) for name in ("time", "attempt", "step", "checkpoint", "world_size")}
                for event in log.events
                if event.get("event") == "resume"
            ],
        }

    def _phase_times(self, found: list[CheckpointView]) -> dict[str, Any]:
        """From the end event of the log or, before the end, from the newest checkpoint."""
        ended = self.log.ended
        if ended is not None:
            return {"phases": _phases_in(ended), "phases_of": "the whole run"}
        for one in found:
            if one.problem is None and one.resumable:
                if one.name not in self._phases:
                    self._phases = {one.name: _phases_in(_state_in(self.folder / one.name))}
                return {"phases": self._phases[one.name], "phases_of": f"up to {one.name}"}
        return {}


def _check_folder(folder: Path) -> None:
    """Raise OutputError unless ``folder`` contains a run."""
    try:
        if not folder.is_dir():
            raise OutputError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
        if _is_run(folder):
            return
        inside = sorted(path.name for path in folder.iterdir() if path.is_dir() and _is_run(path))
    except OSError as error:
        raise OutputError(f"{folder}: cannot be read: {error.strerror or error}") from error
    hint = ""
    if (folder / MANIFEST).is_file():
        hint = f"; it is a checkpoint: pass the output folder, {folder.absolute().parent}"
    elif inside:
        more = f" and {len(inside) - 5} more" if len(inside) > 5 else ""
        hint = f"; it contains runs in {listing(inside[:5])}{more}"
    raise OutputError(
        f"{folder}: not the output folder of a run: it has no {STATUS}, no {_LOG} and no checkpoint{hint}"
    )


def _is_run(folder: Path) -> bool:
    names = (STATUS, _LOG, LOCK)
    return any((folder / name).exists() for name in names) or bool(checkpoints(folder))


def _read(folder: Path) -> tuple[RunStatus | None, str]:
    """``status.json``, or the reason why it cannot be read."""
    try:
        status = read_status(folder)
        if status is not None and max(status.step, status.total_steps, status.attempt) > _LARGEST_COUNT:
            raise ValueError("the number of steps or attempts is out of range")
        return status, ""
    except ValueError as error:
        return None, f"{STATUS}: cannot be read ({one_line(error)})"
    except OSError as error:
        return None, f"{STATUS}: cannot be read ({error.strerror or error})"


def _state_in(checkpoint: Path) -> Record:
    """The run state of the first rank in a checkpoint; empty if it cannot be read."""
    try:
        path = checkpoint / _STATE
        found = json.loads(path.read_bytes()) if path.stat().st_size <= _LARGEST_STATE else {}
    except (OSError, ValueError, RecursionError):
        return {}
    state = found.get("phases") if isinstance(found, dict) else None
    return {"phases": state.get("records")} if isinstance(state, dict) else {}


def _phases_in(record: Record) -> dict[str, Record]:
    """Phases by name, those with a valid time."""
    found = record.get("phases")
    phases = found.items() if isinstance(found, dict) else ()
    return {name: one for name, one in phases if isinstance(one, dict) and number(one.get("seconds")) is not None}


def _text_of(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    with contextlib.suppress(OverflowError, ValueError, OSError):  # a file system may report any year
        return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _int(value: Any) -> int | None:
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST_COUNT
    return value if known else None
