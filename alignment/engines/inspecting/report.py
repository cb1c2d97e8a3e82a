"""Collect the content of a run report from the files in the output folder. Parts without a file are omitted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any

from alignment.config.compatibility.verdicts import judged_names
from alignment.config.fields import option_fields
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS
from alignment.engines.inspecting.checkpoints import CheckpointView
from alignment.engines.inspecting.generated import completion_groups
from alignment.engines.inspecting.run import RunReader
from alignment.engines.inspecting.view import LOST, RunView
from alignment.reporting.html.content import (
    Attempt,
    ChangedOption,
    CheckpointFacts,
    DataFacts,
    PhaseFacts,
    Record,
    RunContent,
)
from alignment.reporting.log_reading import number, seconds_of
from alignment.reporting.model_card import is_secret, without_secret_values
from alignment.reporting.report import duration, gibibytes

_LARGEST = 64 * 2**20  # bytes of a JSON file that is read
_MOST_STEPS = 8
_LONGEST_VALUE = 300  # characters of an option's value
_NOT_OPTIONS = ("method", "output_dir", "dry_run")
_DATA_COUNTS = {
    "desirable": "desirable", "undesirable": "undesirable", "prompts_cut": "truncated prompts",
    "completions_cut": "truncated completions", "packs": "packs", "pack_left_out": "omitted sequences without targets",
}  # fmt: skip
_EVENTS = {
    "bad_step": "non-finite or outlying steps",
    "omitted_window": "omitted windows",
    "overflow": "fp16 overflows",
    "retry": "retries of reads or reward calls",
}


def content_of(reader: RunReader, view: RunView, *, drawn: datetime | None = None) -> RunContent:
    """Collect the content of the report of a run.

    Args:
        reader: reader of its folder, with history; :meth:`RunReader.read` must have been called.
        view: the result of that call.
        drawn: time of the report. Defaults to now.
    """
    folder, log = reader.folder, reader.log
    options = _object(folder / "options.json")
    start = log.newest("start")
    entries = [entry for entry in log.records if "event" not in entry]
    best = _best_step(folder, view.checkpoints, options)
    resumed = [(int(step), "resumed") for step in _steps(view.resumes)]
    method = view.method or str(options.get("method") or "")
    return RunContent(
        name=view.name or folder.absolute().name,
        folder=str(folder),
        method=_title_of(method),
        state=view.state,
        sentence=_sentence(view),
        error=without_secret_values(view.error) if view.error and view.state == "failed" else None,
        facts=list(_facts(reader, view, options, best)),
        history=[entry for entry in entries if "train_runtime" not in entry],
        marks=resumed + ([(best, "best checkpoint")] if best is not None else []),
        train=view.metrics,
        train_step=view.metrics_step,
        evaluation={name.removeprefix("eval_"): value for name, value in view.evaluation.items()},
        evaluation_step=view.evaluation_step,
        data=list(_data(start)),
        completions=completion_groups(folder / "completions.jsonl"),
        options=_changed(options, method),
        phases=[_phase(name, one) for name, one in view.phases.items()],
        phases_of=view.phases_of,
        memory={"cuda": "peak GPU memory", "cpu": "peak resident memory"}.get(str(start.get("device")), "peak memory"),
        attempts=_attempts(start, view),
        checkpoints=[_checkpoint(one, best) for one in view.checkpoints],
        warnings=[*_warnings(log.events), *view.problems, *view.notes],
        advice=[str(text) for event in (start, log.ended or {}) for text in _list(event.get("advice"))],
        versions={str(name): str(text) for name, text in _mapping(start.get("versions")).items()},
        drawn=(drawn or datetime.now(timezone.utc)).strftime("%Y-%m-%d %H:%M UTC"),
    )


def read_content(folder: Path, *, state: str | None = None) -> RunContent:
    """Collect the content of a run in this process.

    Args:
        folder: the output folder.
        state: state of the run if ``status.json`` does not contain it yet.
    """
    reader = RunReader(folder, history=True)
    view = reader.read()
    return content_of(reader, view if state is None else replace(view, state=state, error=None, signal=None))


# The head ------------------------------------------------------------------------------------------------------------


def _sentence(view: RunView) -> str:
    if view.state == LOST:
        return f"No heartbeat since {_time(view.last_heartbeat)}: {view.reason}."
    if view.state in ("stopped", "preempted"):
        by = f" by {view.signal}" if view.signal else ""
        step = "" if view.step is None else f" after step {view.step}"
        return f"{view.state.capitalize()}{by}{step}."
    if view.state in ("starting", "running"):
        return "This run is in progress; the report shows it as of the time below."
    return ""


def _facts(
    reader: RunReader, view: RunView, options: Mapping[str, Any], best: int | None
) -> Iterator[tuple[str, str]]:
    start, log = reader.log.newest("start"), reader.log
    model = start.get("model") or options.get("model_name_or_path")
    if model:
        yield "Model", str(model)
    if view.step is not None:
        yield "Steps", f"{view.step:,} of {view.total_steps:,}" if view.total_steps else f"{view.step:,}"
    epoch = number(log.last.get("epoch"))
    if epoch is not None:
        yield "Epochs", f"{epoch:.3g}"
    seconds = _seconds(reader)
    if seconds:
        yield "Time", duration(seconds)
    if view.tokens:
        yield "Tokens", f"{view.tokens:,}"
    if view.tokens_per_second:
        yield "Throughput", f"{view.tokens_per_second:,.0f} tokens/s"
    window = start.get("window")
    if isinstance(window, int):
        yield "Rows per step", f"{window:,}"
    if view.world_size:
        yield "Ranks", f"{view.world_size:,}"
    if start.get("time"):
        yield "Started", _time(str(start["time"]))
    if view.job:
        yield "SLURM job", view.job + (f", requeued {view.restarts}×" if view.restarts else "")
    if best is not None:
        yield "Best checkpoint", f"checkpoint-{best}"
    for text in str(start.get("models") or "").split("; "):
        role, _, rest = text.partition(": ")
        if rest:
            yield role.capitalize(), rest


def _seconds(reader: RunReader) -> float | None:
    """Return the training time: the logged total or, before the end, the time spanned by the log without pauses."""
    known = number(reader.log.totals.get("train_runtime"))
    if known is not None:
        return known
    total, begin, last = 0.0, None, None
    for record in reader.log.records:
        time = seconds_of(record.get("time"))
        if record.get("event") in ("start", "resume"):
            total += last - begin if begin is not None and last is not None else 0.0
            begin = time
        last = time if time is not None else last
    return total + (last - begin if begin is not None and last is not None else 0.0)


def _best_step(folder: Path, checkpoints: Sequence[CheckpointView], options: Mapping[str, Any]) -> int | None:
    if not (options.get("load_best_model_at_end") or options.get("metric_for_best_model")):
        return None
    newest = [folder / one.name for one in checkpoints[:1]]
    for place in (folder, *newest):
        step = _object(place / "trainer_state.json").get("best_global_step")
        if isinstance(step, int):
            return step
    return None


# Options -------------------------------------------------------------------------------------------------------------


def _changed(options: Mapping[str, Any], method: str) -> list[ChangedOption]:
    """Return the options that differ from their defaults, without secrets, and without importing external methods."""
    declared = METHODS[method] if method in METHODS.entries else AlignmentConfig
    defaults = {one.name: one.default for one in option_fields(declared)}
    ignored = judged_names(declared) | {*_NOT_OPTIONS}
    found = []
    for name, value in options.items():
        default = defaults.get(name)
        default = default.value if isinstance(default, Enum) else default
        if name not in ignored and not is_secret(name) and value is not None and value != default:
            shown = "" if name not in defaults else "unset" if default is None else _text(default)
            found.append(ChangedOption(name, _text(value), shown))
    return found


def _text(value: Any) -> str:
    value = _without_secrets(value)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(each) for key, each in value.items() if not is_secret(str(key))}
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    return without_secret_values(value) if isinstance(value, str) else value


# Events and data -----------------------------------------------------------------------------------------------------


def _data(start: Record) -> Iterator[DataFacts]:
    recorded = [one for one in _list(start.get("data")) if isinstance(one, dict)]
    if not recorded and isinstance(start.get("rows"), int):  # a log of an older release
        yield DataFacts("training", "", None, start["rows"], _counts(start.get("dropped")))
    for one in recorded:
        yield DataFacts(
            role=str(one.get("role", "")),
            where=str(one.get("where", "")),
            rows_in=_whole(one.get("rows_in")),
            rows_out=_whole(one.get("rows_out")),
            dropped=_counts(one.get("dropped")),
            counts={text: count for key, text in _DATA_COUNTS.items() if (count := _whole(one.get(key)))},
            lengths={str(name): _counts(each) for name, each in _mapping(one.get("lengths")).items() if _counts(each)},
        )


def _attempts(start: Record, view: RunView) -> list[Attempt]:
    if not view.resumes:
        return []
    ranks = start.get("world_size")
    found = [Attempt("1", _time(start.get("time")), "scratch", "" if ranks is None else str(ranks))]
    for event in view.resumes:
        begins = f"{event.get('checkpoint') or 'a checkpoint'}, step {event.get('step')}"
        values = ["" if event.get(name) is None else str(event[name]) for name in ("attempt", "world_size")]
        found.append(Attempt(values[0], _time(event.get("time")), begins, values[1]))
    return found


def _checkpoint(one: CheckpointView, best: int | None) -> CheckpointFacts:
    size = gibibytes(one.bytes) if one.bytes >= 2**30 / 100 else f"{one.bytes / 1e6:.1f} MB"
    condition = "complete" if one.resumable else "complete, weights only"
    if one.problem is not None:
        size, condition = "", f"incomplete: {one.problem}"
    return CheckpointFacts(one.name, one.step, size, condition, best=one.step == best)


def _warnings(events: Sequence[Record]) -> Iterator[str]:
    for name, said in _EVENTS.items():
        found = [event for event in events if event.get("event") == name]
        steps = [str(step) for step in dict.fromkeys(_steps(found))]
        more = " …" if len(steps) > _MOST_STEPS else ""
        at = f" (step {', '.join(steps[:_MOST_STEPS])}{more})" if steps else ""
        if found:
            yield f"{said.capitalize() if said[:2] != 'fp' else said}: {len(found)}{at}. See log.jsonl."


def _phase(name: str, record: Record) -> PhaseFacts:
    values = {key: number(record.get(key)) or 0.0 for key in ("seconds", "tokens", "peak_bytes", "entries")}
    return PhaseFacts(name, **values)


def _title_of(method: str) -> str:
    return str(METHODS[method].TITLE) if method in METHODS.entries else method


def _steps(events: Sequence[Record]) -> list[int]:
    return [step for event in events if (step := _whole(event.get("step"))) is not None]


def _time(text: Any) -> str:
    return text[:16].replace("T", " ") + " UTC" if isinstance(text, str) and len(text) >= 16 else ""


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _counts(value: Any) -> dict[str, int]:
    return {str(name): count for name, each in _mapping(value).items() if (count := _whole(each)) is not None}


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; return an empty one if this fails."""
    try:
        return _mapping(json.loads(path.read_bytes())) if path.stat().st_size <= _LARGEST else {}
    except (OSError, ValueError, RecursionError):
        return {}
