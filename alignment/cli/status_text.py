"""A run as text: a table of a few lines, or a single line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alignment.config.errors import counted
from alignment.engines.inspecting.checkpoints import CheckpointView
from alignment.engines.inspecting.view import LOST, UNKNOWN, RunView
from alignment.reporting.log_reading import is_mean, number
from alignment.reporting.report import duration, gibibytes

_WIDTH = 12  # of the names on the left
_CHECKPOINTS = 8
_METRICS = 10
_FIRST = ("loss", "eval_loss", "rewards/margins", "eval_rewards/margins", "rewards/accuracies", "kl", "grad_norm")


def status_lines(view: RunView) -> list[str]:
    """Everything about a run, one line per item."""
    rows = [
        ("state", state_sentence(view)),
        ("step", _step(view)),
        ("speed", _speed(view)),
        ("metrics", _metrics(view.metrics, view.metrics_step)),
        ("evaluation", _metrics(view.evaluation, view.evaluation_step)),
        ("attempt", _attempt(view)),
        *_named("checkpoints", list(_checkpoints(view))),
        *_named("phases", list(_phases(view))),
        ("report", view.report or ""),
        ("started", _time(view.started)),
        ("updated", _time(view.updated)),
        *(("note", note) for note in view.notes),
        *(("problem", problem) for problem in view.problems),
    ]
    title = ": ".join(part for part in (view.method, view.folder) if part)
    return [title, *(f"  {name.ljust(_WIDTH)}{text}".rstrip() for name, text in rows if text)]


def status_line(view: RunView) -> str:
    """The most important values in one line."""
    metrics = _metrics({name: view.metrics[name] for name in _FIRST if name in view.metrics}, None)
    return "; ".join(part for part in (state_sentence(view), _step(view), _speed(view), metrics) if part)


def state_sentence(view: RunView) -> str:
    """The state, its cause and the phase."""
    if view.state == LOST:
        return f"no heartbeat since {_time(view.last_heartbeat)}: {view.reason}{_where(view, ' in')}"
    if view.state == UNKNOWN:
        return "unknown: there is no readable status.json, and the log has no end event"
    said = view.state + (f" by {view.signal}" if view.signal else "")
    if view.state in ("starting", "running"):
        by = view.holder or (f"process {view.pid} on {view.host}" if view.pid and view.host else "")
        said += f": {by}" if by else ""
        said += _where(view, ",") if view.state == "running" else ""
        return said if view.alive is not None else f"{said} (no heartbeat seen yet)"
    if view.error:
        said += f": {view.error}"
    return f"{said}; {view.holder} has taken over" if view.holder else said


def _where(view: RunView, before: str) -> str:
    return f"{before} phase {view.phase}" if view.phase else ""


def _step(view: RunView) -> str:
    if view.step is None:
        return ""
    if not view.total_steps:
        return str(view.step)
    said = f"{view.step} of {view.total_steps} ({100 * view.step / view.total_steps:.0f}%)"
    return said if view.eta_seconds is None else f"{said}, about {_left(view.eta_seconds)} left"


def _left(seconds: float) -> str:
    """An estimated time, rounded to minutes."""
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes:02d} min" if hours else duration(seconds)


def _speed(view: RunView) -> str:
    parts = []
    if view.steps_per_second:
        rate = view.steps_per_second
        parts.append(f"{rate:.3g} steps/s" if rate >= 0.1 else f"{1 / rate:.3g} s per step")
    if view.tokens_per_second:
        parts.append(f"{view.tokens_per_second:,.0f} tokens/s")
    return ", ".join(parts)


def _metrics(metrics: Mapping[str, Any], step: int | None) -> str:
    known = {name: value for name, each in metrics.items() if (value := number(each)) is not None and is_mean(name)}
    names = [*(name for name in _FIRST if name in known), *(name for name in known if name not in _FIRST)]
    said = ", ".join(f"{name} {known[name]:.4g}" for name in names[:_METRICS])
    more = f" and {len(names) - _METRICS} more" if len(names) > _METRICS else ""
    return f"{f'step {step}: ' if step is not None else ''}{said}{more}" if said else ""


def _attempt(view: RunView) -> str:
    if view.attempt is None:
        return ""
    said = str(view.attempt)
    if view.stalled is not None and view.stalled > 1:
        said += f", {view.stalled} in a row without a newer checkpoint"
    if view.restarts:
        said += f", requeued {counted(view.restarts, 'time')}"
    steps = [str(event["step"]) for event in view.resumes if event.get("step") is not None]
    return f"{said}; resumed after step {', '.join(steps)}" if steps else said


def _checkpoints(view: RunView) -> Iterator[str]:
    width = max((len(one.name) for one in view.checkpoints[:_CHECKPOINTS]), default=0)
    for one in view.checkpoints[:_CHECKPOINTS]:
        yield f"{one.name.ljust(width)}  {_completeness(one)}"
    if len(view.checkpoints) > _CHECKPOINTS:
        broken = sum(one.problem is not None for one in view.checkpoints[_CHECKPOINTS:])
        damaged = f", {broken} of them incomplete" if broken else ""
        yield f"and {len(view.checkpoints) - _CHECKPOINTS} older{damaged}"
    for name in view.partial:
        yield f"{name}  {'incomplete: the run ended while writing it' if view.over else 'being written'}"


def _completeness(one: CheckpointView) -> str:
    if one.problem is not None:
        return f"incomplete: {one.problem}"
    size = gibibytes(one.bytes) if one.bytes >= 2**30 / 100 else f"{one.bytes / 1e6:.1f} MB"
    return f"complete, {size}" if one.resumable else f"complete, {size}, weights only"


def _phases(view: RunView) -> Iterator[str]:
    ordered = sorted(view.phases.items(), key=lambda item: -item[1]["seconds"])
    total = sum(one["seconds"] for _, one in ordered) or 1.0
    for name, one in ordered:
        yield f"{name}: {duration(one['seconds'])} ({100 * one['seconds'] / total:.0f}%)"
    if ordered:
        yield f"({view.phases_of})"


def _named(name: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    """Name the first line of a table only."""
    return [("" if number else name, line) for number, line in enumerate(lines)]


def _time(text: str | None) -> str:
    return (text or "").replace("T", " ").replace("Z", " UTC")
