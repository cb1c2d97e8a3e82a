"""The state of a run according to its files, in plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from alignment.engines.inspecting.checkpoints import CheckpointView
from alignment.reporting.log_reading import Record

LOST, UNKNOWN = "lost", "unknown"  # states in addition to those of status.json


@dataclass(frozen=True)
class RunView:
    """The state of a run according to its files. Unknown values are None or empty.

    Attributes:
        folder: The output folder.
        state: ``starting``, ``running``, ``preempted``, ``stopped``, ``failed`` or ``finished``, from
            ``status.json``; ``lost``: the file reports a running process, but there is no sign of it; ``unknown``:
            there is no readable ``status.json``, and neither log nor lock show the state.
        reason: Why the run is considered lost.
        last_sign: Time of the run's last write, by the clock of the file system.
        lives: Whether its process is alive; None if unknown, or not known yet.
        signal, error, method, run, attempt, stalled, host, pid, world_size, job, restarts, phase, started: From
            ``status.json``.
        updated: When ``status.json`` was written.
        name: ``run_name``.
        holder: The process that holds the output folder.
        step, total_steps: Optimizer steps.
        eta_seconds: Time to the last step at the present rate.
        steps_per_second, tokens_per_second: See :meth:`LogReader.rates`.
        tokens: Number of tokens trained on so far.
        metrics, metrics_step: The newest training entry of the log.
        evaluation, evaluation_step: The newest evaluation.
        resumes: Resumes from checkpoints: time, attempt, step.
        phases: Time, tokens and peak memory of each phase on the first rank.
        phases_of: Whether these are for the whole run or up to a checkpoint.
        checkpoints: All checkpoints, newest first.
        partial: Checkpoints that are being written, or were when the run was killed.
        report: Path of the report.
        notes: Notes for the reader, such as differing clocks.
        problems: Files that could not be read.
    """

    folder: str
    state: str
    reason: str = ""
    last_sign: str | None = None
    lives: bool | None = None
    signal: str | None = None
    error: str | None = None
    method: str = ""
    run: str = ""
    name: str = ""
    attempt: int | None = None
    stalled: int | None = None
    host: str = ""
    pid: int | None = None
    world_size: int | None = None
    job: str = ""
    restarts: int | None = None
    phase: str = ""
    started: str = ""
    updated: str = ""
    holder: str = ""
    step: int | None = None
    total_steps: int | None = None
    eta_seconds: float | None = None
    steps_per_second: float | None = None
    tokens_per_second: float | None = None
    tokens: int | None = None
    metrics: Record = field(default_factory=dict)
    metrics_step: int | None = None
    evaluation: Record = field(default_factory=dict)
    evaluation_step: int | None = None
    resumes: list[Record] = field(default_factory=list)
    phases: dict[str, Record] = field(default_factory=dict)
    phases_of: str = ""
    checkpoints: list[CheckpointView] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    report: str | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object. The keys are the names of the attributes and are stable."""
        values = {each.name: _strict(getattr(self, each.name)) for each in fields(self)}
        return {**values, "checkpoints": [one.to_dict() for one in self.checkpoints]}

    @property
    def settled(self) -> bool:
        """Whether it is known if the run is alive."""
        return self.state not in ("starting", "running") or self.lives is not None

    @property
    def over(self) -> bool:
        """Whether this attempt has ended."""
        return self.state not in ("starting", "running") and self.lives is not True


def _strict(value: Any) -> Any:
    """Replace inf and nan, which JSON does not support, by None."""
    if isinstance(value, dict):
        return {name: _strict(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
