"""A run as seen in its files, in plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from alignment.engines.inspecting.checkpoints import CheckpointView
from alignment.reporting.log_reading import Record

LOST, UNKNOWN = "lost", "unknown"  # states in addition to those of status.json


@dataclass(frozen=True)
class RunView:
    """A run as seen in its files. Unknown values are None or empty.

    Attributes:
        folder: the output folder.
        state: ``starting``, ``running``, ``preempted``, ``stopped``, ``failed`` or ``finished``, as ``status.json``
            says; ``lost``: it says that the run is in progress, but its process is gone; ``unknown``: there is no
            readable ``status.json``, and neither log nor lock tell.
        reason: how it is known that the run is lost.
        last_heartbeat: when the run last wrote something, by the clock of the file system.
        alive: whether its process is alive; None if this is not known, or not known yet.
        signal, error, method, run, attempt, stalled, host, pid, world_size, job, restarts, phase, started: as
            ``status.json`` says.
        updated: when ``status.json`` was written.
        name: ``run_name``.
        holder: the process that holds the output folder.
        step, total_steps: optimizer steps.
        eta_seconds: until the last step, at the current rate.
        steps_per_second, tokens_per_second: see ``LogReader.rates``.
        tokens: trained on so far.
        metrics, metrics_step: of the newest training entry of the log.
        evaluation, evaluation_step: of the newest evaluation.
        resumes: each resume from a checkpoint: time, attempt, step.
        phases: time, tokens and peak memory of each phase, of the first rank.
        phases_of: what the phases cover: the whole run, or the run up to a checkpoint.
        checkpoints: the newest first.
        partial: checkpoints that are being written, or were when the run was killed.
        report: path of the report.
        notes: caveats, such as clocks that differ.
        problems: files that could not be read.
    """

    folder: str
    state: str
    reason: str = ""
    last_heartbeat: str | None = None
    alive: bool | None = None
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
        """The run as a JSON object; the keys are the names of the attributes, and are stable."""
        values = {each.name: _strict(getattr(self, each.name)) for each in fields(self)}
        return {**values, "checkpoints": [one.to_dict() for one in self.checkpoints]}

    @property
    def settled(self) -> bool:
        """Whether it is known if the run's process is alive."""
        return self.state not in ("starting", "running") or self.alive is not None

    @property
    def over(self) -> bool:
        """Whether this attempt has ended."""
        return self.state not in ("starting", "running") and self.alive is not True


def _strict(value: Any) -> Any:
    """The value with None for inf and nan, which are not valid JSON."""
    if isinstance(value, dict):
        return {name: _strict(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_strict(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
