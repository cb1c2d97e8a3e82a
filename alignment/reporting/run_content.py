"""Collect the content of a run's report from its output folder. What the folder does not contain is omitted."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from alignment.compat.trl.verdicts import judged_names
from alignment.config.fields import option_fields
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS
from alignment.reporting.html.charts import charts, compared
from alignment.reporting.html.page import (
    Card,
    Page,
    Sample,
    Samples,
    Section,
    Table,
    badge,
    brief,
    metrics_section,
    phases_section,
    shown,
    swatch,
)
from alignment.reporting.log_reading import Log, Record, number, parsed, seconds_of
from alignment.reporting.model_card import is_secret, without_secret_values
from alignment.reporting.report import duration
from alignment.reporting.run_view import IN_PROGRESS, RunView, read_run, utc

_LONGEST_VALUE = 300  # characters of an option's value
_LONGEST_TEXT = 1500  # characters of a prompt or completion
_MOST_PROMPTS = 6  # in a group of completions
_MOST_TILES = 6
# Metrics of the tiles at the top, in order of importance.
_TILES = {
    "loss": "Loss", "eval_loss": "Evaluation loss", "rewards/margins": "Reward margin",
    "rewards/accuracies": "Reward accuracy", "eval_rewards/accuracies": "Evaluation accuracy",
    "eval_win_rate": "Win rate", "objective/scores": "Score", "kl": "KL", "objective/kl": "KL",
    "mean_token_accuracy": "Token accuracy", "completions/mean_length": "Completion length",
    "grad_norm": "Gradient norm",
}  # fmt: skip
_DATA_COUNTS = {
    "desirable": "desirable", "undesirable": "undesirable", "prompts_cut": "truncated prompts",
    "completions_cut": "truncated completions", "packs": "packs", "pack_left_out": "omitted sequences without targets",
}  # fmt: skip
_EVENTS = {
    "bad_step": "Non-finite or outlying steps", "omitted_window": "Omitted windows", "overflow": "fp16 overflows",
    "retry": "Retries of reads or reward calls",
}  # fmt: skip
_MONO, _VALUE = "mono name", "value mono"


@dataclass(frozen=True)
class RunContent:
    """A run as its report shows it: its page, and what a comparison puts side by side with other runs."""

    page: Page
    method: str
    history: Sequence[Record]  #: training and evaluation entries of the log
    train: Record  #: the newest metrics
    evaluation: Record  #: the newest ones, without the prefix ``eval_``
    options: Mapping[str, tuple[str, str]]  #: value and default, empty if unknown, of the changed ones


def read_content(folder: Path, *, state: str | None = None) -> RunContent:
    """Collect the content of the report of a run; ``state`` is its state if ``status.json`` does not have it yet."""
    view = read_run(folder)
    log, start, state = view.log, view.log.newest("start"), state or view.status.state
    given = read_object(folder / "options.json", _without_secrets)
    history = [entry for entry in log.records if "event" not in entry and "train_runtime" not in entry]
    best, method = _best_step(folder, view, given), view.status.method or str(given.get("method") or "")
    marks = [(event["step"], "resumed") for event in view.resumes] + (
        [] if best is None else [(best, "best checkpoint")]
    )
    named = METHODS[method] if method in METHODS.entries else None  # external methods are not imported
    method = method if named is None else str(named.TITLE)
    options = {
        name: (_text(value), "unset" if default is None else _text(default))
        for name, value, default in changed_options(given, named or AlignmentConfig)
        if name not in ("method", "output_dir", "dry_run")
    }
    evaluation = {name.removeprefix("eval_"): value for name, value in view.evaluation.items()}
    metrics = (("Training", view.metrics_step, view.metrics), ("Evaluation", view.evaluation_step, evaluation))
    memory = "peak GPU memory" if start.get("device") == "cuda" else "peak resident memory"
    part = "the whole run" if log.ended else f"up to step {view.status.step}"
    best_badge = Markup(" ") + badge("best", "good")
    sections = [
        Section("Warnings and advice", messages=[*_messages(view)]),
        Section("Curves", _marked(marks), charts=charts(history, marks)),
        Section("Completions", samples=_samples(folder / "completions.jsonl")),
        metrics_section(metrics),
        phases_section(view.phases, memory, f"Rank 0, {part}."),
        Section("Data", cards=[_data(one) for one in start.get("data", ())], columns=True),
        _table("Options", "Options changed from their defaults.", ("option", "value", "default"),
               [(name, *both) for name, both in options.items()], (_MONO, _VALUE, f"{_VALUE} muted")),
        _table("Attempts", "", ("attempt", "started", "from", "ranks"),
               [_attempt(event) for event in (start, *view.resumes)] if view.resumes else [], ("",) * 4),
        _table("Checkpoints", "", ("name", "step", "size", "condition"),
               [(one.name, one.step, one.size, escape(one.condition) + best_badge * (one.step == best))
                for one in view.checkpoints], ("mono nowrap", "", "nowrap", "")),
        _table("Versions", "", ("library", "version"), [*start.get("versions", {}).items()], ("", "")),
    ]  # fmt: skip
    page = Page(
        title=view.name or folder.absolute().name,
        kind=method,
        sections=sections,
        footer=f"Drawn {_now()} from the files in the output folder. All values are in log.jsonl.",
        folder=str(folder),
        state=state,
        facts=[(name, str(value)) for name, value in _facts(view, given) if value],
        tiles=_tiles(history),
        note=_note(view, state),
    )
    return RunContent(page, method, history, view.metrics, evaluation, options)


def comparison(contents: Sequence[RunContent]) -> Page:
    """The page that compares several runs, which are named by their folders if they have the same name."""
    titles = [one.page.title for one in contents]
    names = [title if titles.count(title) == 1 else one.page.folder for title, one in zip(titles, contents)]
    defaults = {name: default for one in contents for name, (_, default) in one.options.items()}
    values = [{name: one.options.get(name, ("", defaults[name]))[0] or defaults[name] for name in sorted(defaults)}
              for one in contents]  # fmt: skip
    values = [{name: text for name, text in each.items() if len({one[name] for one in values}) > 1} for each in values]
    runs = [
        (swatch(color, name), one.method, badge(one.page.state), one.page.folder)
        for color, (name, one) in enumerate(zip(names, contents), start=1)
    ]
    return Page(
        title=f"{len(contents)} runs",
        kind="Comparison",
        sections=[
            _table("Runs", "", ("run", "method", "state", "folder"), runs, ("", "", "", f"{_VALUE} muted")),
            Section("Curves", charts=compared([one.history for one in contents], names)),
            _side_by_side("Training metrics", "metric", names, "number", [shown(one.train) for one in contents]),
            _side_by_side(
                "Evaluation metrics", "metric", names, "number", [shown(one.evaluation) for one in contents]
            ),
            _side_by_side("Options that differ", "option", names, _VALUE, values),
            _side_by_side("Facts", "fact", names, "value", [dict(one.page.facts) for one in contents]),
        ],
        footer=f"Drawn {_now()} from the files in the output folders.",
    )


def _table(title: str, lead: str, heads: Sequence[str], rows: Sequence[Any], classes: Sequence[str]) -> Section:
    return Section(title, lead, [Card([Table(title, heads, rows, classes)])] if rows else [])


def _side_by_side(
    title: str, first: str, names: Sequence[str], kind: str, columns: Sequence[Mapping[str, str]]
) -> Section:
    rows = [[name, *(column.get(name, "") for column in columns)] for name in dict.fromkeys(itertools.chain(*columns))]
    classes = ["" if first == "fact" else _MONO, *[kind] * len(names)]
    return _table(title, "As last logged." if first == "metric" else "", [first, *names], rows, classes)


def _marked(marks: Sequence[tuple[int, str]]) -> str:
    return f"Dotted lines: {', '.join(f'{label} (step {step})' for step, label in marks)}." if marks else ""


def _note(view: RunView, state: str) -> tuple[str, str, str] | None:
    if state == "failed" and view.status.error:
        return "bad", "Error.", without_secret_values(view.status.error)
    if state in IN_PROGRESS:
        return "info", "", "This run is in progress; the report shows it as of the time below."
    sentence = f"{view.sentence[0].upper()}{view.sentence[1:]}."
    return (
        None if state in ("finished", "unknown") else ("bad" if state in ("failed", "lost") else "warn", "", sentence)
    )


def _tiles(history: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Label, last value, and first value of each tile."""
    found: dict[str, tuple[str, str, str]] = {}
    for metric, label in _TILES.items():
        values = [value for entry in history if (value := number(entry.get(metric))) is not None]
        if values and label not in found:
            found[label] = (label, brief(values[-1]), f"from {brief(values[0])}" if len(values) > 1 else "")
    return list(found.values())[:_MOST_TILES]


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


def _data(one: Record) -> Card:
    rows = {"read": one.get("rows_in"), "kept": one.get("rows_out")}
    rows |= {f"dropped: {reason}": count for reason, count in one.get("dropped", {}).items()}
    rows |= {text: one.get(key) or None for key, text in _DATA_COUNTS.items()}
    role, lengths = str(one.get("role", "")), one.get("lengths") or {}
    counted = [(name, f"{count:,}") for name, count in rows.items() if count is not None]
    tables = [Table(f"Rows of the {role} data", ("rows", "count"), counted, ("", "number"))]
    if lengths:
        heads = ["tokens", *next(iter(lengths.values()))]
        each = [[name, *(f"{value:,}" for value in values.values())] for name, values in lengths.items()]
        tables.append(Table(f"Token counts of the {role} data", heads, each, ["", *["number"] * len(heads)]))
    return Card(tables, role.capitalize(), lead=str(one.get("where", "")))


def _attempt(event: Record) -> tuple[str, ...]:
    begins = "scratch" if event.get("event") == "start" else f"{event.get('checkpoint')}, step {event.get('step')}"
    return str(event.get("attempt") or 1), utc(event.get("time"), 16), begins, str(event.get("world_size", ""))


def _samples(path: Path) -> list[Samples]:
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
    groups = dict[str, list[Sample]]()
    for prompt, row in last.items():
        before, name = first.get(prompt, row), prompt[0].removeprefix("eval").removeprefix("_")
        steps = f"Before and after: steps {before['step']} and {row['step']}"
        title = (f"Step {row['step']}" if before is row else steps) + (f", {name}" if name else "")
        groups.setdefault(title, []).append(_sample(row, before))
    return [Samples(title, rows[:_MOST_PROMPTS], len(rows)) for title, rows in groups.items()]


def _sample(row: Record, before: Record) -> Sample:
    """The texts of two steps side by side; what has not changed, such as the reference's, once."""
    earlier, texts = _texts(before), dict[str, str]()
    for name, text in _texts(row).items():
        if earlier.get(name, text) == text:
            texts[name] = text
        else:
            texts |= {f"{name}, step {before['step']}": earlier[name], f"{name}, step {row['step']}": text}
    scores = {name.replace("_", " "): value for name, each in row.items() if (value := number(each)) is not None}
    scores.pop("step", None)
    return Sample(_cut(row["prompt"], _LONGEST_TEXT), texts, scores)


def _texts(row: Record) -> dict[str, str]:
    found = {name: text for name, text in row.items() if isinstance(text, str) and name not in ("prompt", "dataset")}
    names = {"completion": "policy"}
    return {names.get(name, name.replace("_", " ")): _cut(text, _LONGEST_TEXT) for name, text in found.items()}


def _messages(view: RunView) -> Iterator[tuple[str, str]]:
    for name, said in _EVENTS.items():
        if found := [event for event in view.log.events if event.get("event") == name]:
            at = f", the first in step {found[0]['step']}" if "step" in found[0] else ""
            yield "warning", f"{said}: {len(found)}{at}. See log.jsonl."
    yield from (("warning", problem) for problem in view.problems)
    for event in (view.log.newest("start"), view.log.ended or {}):
        yield from (("advice", text) for text in event.get("advice", ()))


def read_object(path: Path, hook: Callable[[Record], Record] | None = None) -> Record:
    """Read a JSON object, with ``hook`` applied to all objects in it; return an empty one if this fails."""
    found: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_bytes(), object_hook=hook)
    return found if isinstance(found, dict) else {}


def _without_secrets(found: Record) -> Record:
    return {name: value for name, value in found.items() if not is_secret(name)}


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
