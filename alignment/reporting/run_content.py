"""Collect the content of a run's report from its output folder. What the folder does not contain is omitted."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from alignment.compat.trl.verdicts import judged_names
from alignment.config.fields import option_fields
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS
from alignment.reporting.html import content
from alignment.reporting.log_reading import Log, Record, number, parsed, seconds_of
from alignment.reporting.model_card import is_secret, without_secret_values
from alignment.reporting.report import duration
from alignment.reporting.run_view import IN_PROGRESS, RunView, read_run, utc

_LONGEST_VALUE = 300  # characters of an option's value
_LONGEST_TEXT = 1500  # characters of a prompt or completion
_MOST_PROMPTS = 6  # in a group of completions
_DATA_COUNTS = {
    "desirable": "desirable", "undesirable": "undesirable", "prompts_cut": "truncated prompts",
    "completions_cut": "truncated completions", "packs": "packs", "pack_left_out": "omitted sequences without targets",
}  # fmt: skip
_EVENTS = {
    "bad_step": "Non-finite or outlying steps", "omitted_window": "Omitted windows", "overflow": "fp16 overflows",
    "retry": "Retries of reads or reward calls",
}  # fmt: skip
_IN_PROGRESS = "This run is in progress; the report shows it as of the time below."


def read_content(folder: Path, *, state: str | None = None) -> content.RunContent:
    """Collect the content of the report of a run; ``state`` is its state if ``status.json`` does not have it yet."""
    view = read_run(folder)
    log, state, start = view.log, state or view.status.state, view.log.newest("start")
    options = read_object(folder / "options.json", _without_secrets)
    entries = [entry for entry in log.records if "event" not in entry]
    best = _best_step(folder, view, options)
    resumes = [(event["step"], "resumed") for event in view.resumes]
    error, method = view.status.error, view.status.method or str(options.get("method") or "")
    named = METHODS[method] if method in METHODS.entries else None  # external methods are not imported
    return content.RunContent(
        name=view.name or folder.absolute().name,
        folder=str(folder),
        method=method if named is None else str(named.TITLE),
        state=state,
        sentence=_IN_PROGRESS if state in IN_PROGRESS else f"{view.sentence[0].upper()}{view.sentence[1:]}.",
        error=without_secret_values(error) if error and state == "failed" else None,
        facts=[(name, str(value)) for name, value in _facts(view, options) if value],
        history=[entry for entry in entries if "train_runtime" not in entry],
        marks=resumes + ([] if best is None else [(best, "best checkpoint")]),
        train=view.metrics,
        train_step=view.metrics_step,
        evaluation={name.removeprefix("eval_"): value for name, value in view.evaluation.items()},
        evaluation_step=view.evaluation_step,
        data=[_data(one) for one in start.get("data", ())],
        completions=_completions(folder / "completions.jsonl"),
        options=[
            content.ChangedOption(name, _text(value), "unset" if default is None else _text(default))
            for name, value, default in changed_options(options, named or AlignmentConfig)
            if name not in ("method", "output_dir", "dry_run")
        ],
        phases=[content.PhaseFacts(name, **one) for name, one in view.phases.items()],
        phases_of="the whole run" if log.ended else f"up to step {view.status.step}",
        memory="peak GPU memory" if start.get("device") == "cuda" else "peak resident memory",
        attempts=[_attempt(event) for event in (start, *view.resumes)] if view.resumes else [],
        checkpoints=[
            content.CheckpointFacts(one.name, one.step, one.size, one.condition, best=one.step == best)
            for one in view.checkpoints
        ],
        warnings=[*_warnings(log.events), *view.problems],
        advice=[text for event in (start, log.ended or {}) for text in event.get("advice", ())],
        versions=start.get("versions", {}),
        drawn=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _facts(view: RunView, options: Record) -> Iterator[tuple[str, Any]]:
    log, start, status = view.log, view.log.newest("start"), view.status
    epoch, seconds = number(log.last.get("epoch")), _training_seconds(log)
    yield "Model", start.get("model") or options.get("model_name_or_path")
    yield "Steps", f"{status.step:,} of {status.total_steps:,}" if status.total_steps else f"{status.step:,}"
    yield "Epochs", epoch is not None and f"{epoch:.3g}"
    yield "Time", seconds and duration(seconds)
    yield "Tokens", view.tokens and f"{view.tokens:,}"
    yield "Throughput", view.tokens_per_second and f"{view.tokens_per_second:,.0f} tokens/s"
    yield "Rows per step", start.get("window")
    yield "Ranks", f"{status.world_size:,}"
    yield "Started", utc(start.get("time"), 16)
    yield "SLURM job", status.job and status.job + (f", requeued {status.restarts}×" if status.restarts else "")
    for text in str(start.get("models") or "").split("; "):
        role, _, rest = text.partition(": ")
        yield role.capitalize(), rest


def _training_seconds(log: Log) -> float:
    """The logged total or, before the end, the time spanned by the log without the pauses between attempts."""
    times = [(time, record.get("event")) for record in log.records if (time := seconds_of(record.get("time")))]
    spans = [end - begin for (begin, _), (end, event) in itertools.pairwise(times) if event != "resume"]
    return number(log.totals.get("train_runtime")) or sum(spans)


def _best_step(folder: Path, view: RunView, options: Record) -> int | None:
    """Step of the best checkpoint, if a metric chooses it."""
    places = [folder, *(folder / one.name for one in view.checkpoints[:1])]
    steps = [read_object(place / "trainer_state.json").get("best_global_step") for place in places]
    chosen = options.get("load_best_model_at_end") or options.get("metric_for_best_model")
    return next((step for step in steps if step is not None), None) if chosen else None


def changed_options(options: Mapping[str, Any], declared: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, value and default ("" if unknown) of the options that differ from those of the class."""
    defaults = {one.name: one.default for one in option_fields(declared)}
    ignored = judged_names(declared)
    for name, value in options.items():
        if value is not None and value != defaults.get(name) and name not in ignored:
            yield name, value, defaults.get(name, "")


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _cut(without_secret_values(text), _LONGEST_VALUE)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _data(one: Record) -> content.DataFacts:
    counts = {text: one[key] for key, text in _DATA_COUNTS.items() if one.get(key)}
    rows_in, rows_out, dropped = one.get("rows_in"), one.get("rows_out"), one.get("dropped", {})
    return content.DataFacts(one["role"], one["where"], rows_in, rows_out, dropped, counts, one.get("lengths", {}))


def _attempt(event: Record) -> content.Attempt:
    begins = "scratch" if event.get("event") == "start" else f"{event.get('checkpoint')}, step {event.get('step')}"
    attempt, ranks = str(event.get("attempt") or 1), str(event.get("world_size", ""))
    return content.Attempt(attempt, utc(event.get("time"), 16), begins, ranks)


def _completions(path: Path) -> list[content.CompletionGroup]:
    """The completions of the last step, beside those of the first step for the same prompts, by evaluation set."""
    first, last = dict[tuple[str, str], Record](), dict[tuple[str, str], Record]()
    with contextlib.suppress(OSError), path.open("rb") as file:
        for row in map(parsed, file):
            if isinstance(row.get("step"), int) and isinstance(row.get("prompt"), str):
                prompt = str(row.get("dataset") or ""), row["prompt"]
                if row["step"] == next(iter(first.values()), row)["step"]:
                    first[prompt] = row
                if row["step"] != next(iter(last.values()), row)["step"]:
                    last.clear()
                last[prompt] = row
    groups = dict[str, list[content.Completion]]()
    for prompt, row in last.items():
        before, name = first.get(prompt, row), prompt[0].removeprefix("eval").removeprefix("_")
        steps = f"Before and after: steps {before['step']} and {row['step']}"
        title = (f"Step {row['step']}" if before is row else steps) + (f", {name}" if name else "")
        groups.setdefault(title, []).append(_completion(row, before))
    return [content.CompletionGroup(title, rows[:_MOST_PROMPTS], len(rows)) for title, rows in groups.items()]


def _completion(row: Record, before: Record) -> content.Completion:
    """The texts of two steps side by side; what has not changed, such as the reference's, once."""
    earlier, shown = _texts(before), dict[str, str]()
    for name, text in _texts(row).items():
        if earlier.get(name, text) == text:
            shown[name] = text
        else:
            shown |= {f"{name}, step {before['step']}": earlier[name], f"{name}, step {row['step']}": text}
    scores = {name.replace("_", " "): value for name, each in row.items() if (value := number(each)) is not None}
    scores.pop("step", None)
    return content.Completion(_cut(row["prompt"], _LONGEST_TEXT), shown, scores)


def _texts(row: Record) -> dict[str, str]:
    found = {name: text for name, text in row.items() if isinstance(text, str) and name not in ("prompt", "dataset")}
    names = {"completion": "policy"}
    return {names.get(name, name.replace("_", " ")): _cut(text, _LONGEST_TEXT) for name, text in found.items()}


def _warnings(events: Sequence[Record]) -> Iterator[str]:
    for name, said in _EVENTS.items():
        if found := [event for event in events if event.get("event") == name]:
            at = f", the first in step {found[0]['step']}" if "step" in found[0] else ""
            yield f"{said}: {len(found)}{at}. See log.jsonl."


def read_object(path: Path, hook: Callable[[Record], Record] | None = None) -> Record:
    """Read a JSON object, with ``hook`` applied to all objects in it; return an empty one if this fails."""
    found: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes(), object_hook=hook)
    return found if isinstance(found, dict) else {}


def _without_secrets(found: Record) -> Record:
    return {name: value for name, value in found.items() if not is_secret(name)}
