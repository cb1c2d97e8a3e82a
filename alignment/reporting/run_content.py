"""Collect the content of a run's report from its output folder. What the folder does not contain is omitted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from alignment.compat.trl.verdicts import judged_names
from alignment.config.fields import default_of, option_fields
from alignment.config.options import AlignmentConfig
from alignment.config.registry import METHODS
from alignment.reporting import page as html
from alignment.reporting.charts import COLORS, charts, compared
from alignment.reporting.formats import brief, duration, number, shown, size
from alignment.reporting.model_card import is_secret, without_secret_values
from alignment.reporting.page import Section, badge, breakable, table_section
from alignment.reporting.run_view import (
    IN_PROGRESS,
    Log,
    Record,
    RunView,
    metrics_of,
    read_lines,
    read_object,
    read_run,
    seconds_of,
    utc,
)

_LONGEST_VALUE, _LONGEST_TEXT = 300, 1500  # characters of an option's value, of a prompt or completion
_MOST_PROMPTS, _MOST_TILES = 6, 6  # in a group of completions, at the top
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
}  # fmt: skip
# Ends of the names of metrics of which less or more is better.
_LESS, _GREATER = "loss", ("accuracies", "accuracy", "margins", "win_rate", "scores")
_SCALES = ("loss_type", "loss_weights", "beta", "simpo_gamma")  # options that change the scale of a loss
_VALUE = "value mono"
COMPARISON = "comparison.json"  # written by the command ``compare``


class RunContent(NamedTuple):
    """A run as its report shows it: its page, and what a comparison puts side by side with other runs."""

    page: html.Page
    history: Sequence[Record]  #: training and evaluation entries of the log
    train: Record  #: the newest metrics
    evaluation: Record  #: the newest ones, or those of the best weights in the folder, without the prefix ``eval_``
    options: Mapping[str, tuple[str, str]]  #: value and default, empty if unknown, of the changed ones


def read_content(
    folder: Path, *, state: str | None = None, phases: Mapping[str, Mapping[str, float]] | None = None
) -> RunContent:
    """Collect the content of the report of a run.

    ``state`` is its state if ``status.json`` does not have it yet; ``phases`` are the totals of all ranks, instead of
    those of rank 0 in the log.
    """
    view = read_run(folder)
    log, start, state = view.log, view.log.newest("start"), state or view.status.state
    given = read_object(folder / "options.json", _without_secrets)
    best, method = _best_step(folder, view, given), view.status.method or given.get("method", "")
    loaded = best if best is not None and log.ended.get("weights_step") == best else None
    evaluation = log.evaluation(loaded)
    marks: list[tuple[int, str]] = [(event["step"], "resumed") for event in view.resumes if event["step"] is not None]
    marks += [] if best is None else [(best, "best checkpoint")]
    marked = ", ".join(f"{label} (step {step})" for step, label in marks)
    named = METHODS[method] if method in METHODS.entries else None  # external methods are not imported
    options = {
        name: (_text(value), "unset" if default is None else _text(default))
        for name, value, default in changed_options(given, named or AlignmentConfig)
        if name not in ("method", "output_dir", "dry_run")
    }
    evaluated = {name.removeprefix("eval_"): value for name, value in metrics_of(evaluation).items()}
    memory = "peak GPU memory" if start.get("device") == "cuda" else "peak resident memory"
    part = "the whole run" if log.ended else f"up to step {view.status.step}"
    star = Markup(" ") + badge("best", "good")
    checkpoints = [(one.name, one.step, size(one.bytes), escape(one.condition) + star * (one.step == best))
                   for one in view.checkpoints]  # fmt: skip
    sections = [
        Section("Warnings and advice", messages=[*_messages(view)]),
        Section("Curves", marked and f"Dotted lines: {marked}.", charts=charts(log.entries, marks)),
        Section("Completions", cards=[*_samples(folder / "completions.jsonl")]),
        comparison_section(read_object(folder / COMPARISON)),
        html.metrics_section([("Training", view.metrics_step, view.metrics),
                              ("Evaluation", evaluation.get("step"), evaluated)]),
        html.phases_section(phases or view.phases, memory, "" if phases else f"Rank 0, {part}."),
        Section("Data", cards=[_data(one) for one in start.get("data", ())], columns=True),
        table_section(
            "Options", ("option", "value", "default"), [(breakable(name), *both) for name, both in options.items()],
            ("mono", _VALUE, f"{_VALUE} muted"), "Options changed from their defaults.",
        ),
        table_section(
            "Attempts", ("attempt", "started", "from", "ranks"),
            [_attempt(event) for event in (start, *view.resumes)] if view.resumes else [], ("",) * 4,
        ),
        table_section("Checkpoints", ("name", "step", "size", "condition"), checkpoints,
                      ("mono nowrap", "", "nowrap", "")),
        table_section("Versions", ("library", "version"), [*start.get("versions", {}).items()], ("", "")),
    ]  # fmt: skip
    page = html.Page(
        title=view.name or folder.absolute().name,
        kind=named.TITLE if named else method,
        sections=sections,
        footer=f"Drawn {_now()} from the files in the output folder. All values are in log.jsonl.",
        folder=str(folder),
        state=state,
        facts={name: str(value) for name, value in _facts(view, given, loaded) if value},
        tiles=_tiles(log.entries),
        note=_note(view, state),
    )
    return RunContent(page, log.entries, view.metrics, evaluated, options)


def comparison(contents: Sequence[RunContent]) -> html.Page:
    """The page that compares several runs, which are named by their folders if they have the same name."""
    titles = [one.page.title for one in contents]
    names = [title if titles.count(title) == 1 else one.page.folder for title, one in zip(titles, contents)]
    defaults = {name: default for one in contents for name, (_, default) in one.options.items()}
    values = [{name: one.options.get(name, (defaults[name],))[0] for name in sorted(defaults)} for one in contents]
    values = [{name: text for name, text in each.items() if len({one[name] for one in values}) > 1} for each in values]
    color = '<span class="run color-{}"><span class="swatch"></span><span>{}</span></span>'
    runs = [
        (Markup(color).format(place % COLORS + 1, name), one.page.kind, badge(one.page.state), one.page.folder)
        for place, (name, one) in enumerate(zip(names, contents))
    ]
    histories = [one.history for one in contents]
    same = len({(one.page.kind, *(one.options.get(name, ("",))[0] for name in _SCALES)) for one in contents}) == 1
    tables: tuple[tuple[str, str, str, Sequence[Mapping[str, Any]], str], ...] = (
        ("Options that differ", "option", _VALUE, values, ""),
        ("Best values", "metric", "number", _best_values(histories, same), "With their steps."),
        ("Training metrics", "metric", "number", [shown(one.train) for one in contents], "As last logged."),
        ("Evaluation metrics", "metric", "number", [shown(one.evaluation) for one in contents], "As last logged."),
        ("Facts", "fact", "value", [one.page.facts for one in contents], ""),
    )
    sections = [
        table_section("Runs", ("run", "method", "state", "folder"), runs, ("", "", "", f"{_VALUE} muted")),
        Section("Curves", charts=compared(histories, names)),
    ]
    for place, (title, first, kind, columns, lead) in enumerate(tables):
        kept = dict.fromkeys(itertools.chain(*columns))
        rows = [[breakable(name), *(column.get(name, "") for column in columns)] for name in kept]
        classes = ["" if first == "fact" else "mono", *[kind] * len(names)]
        section = table_section(title, [first, *names], rows, classes, lead)
        sections.insert(place if place < 2 else len(sections), section)  # the first two precede the runs
    footer = f"Drawn {_now()} from the files in the output folders."
    return html.Page(title=f"{len(contents)} runs", kind="Comparison", sections=sections, footer=footer)


def _best_values(histories: Sequence[Sequence[Record]], same: bool) -> list[dict[str, Markup]]:
    """The best value of each metric in each history, for metrics with a best one; the best of several is marked.

    Unless the runs optimize the ``same`` loss, neither losses nor implicit rewards are on the same scale.
    """
    columns: list[dict[str, Markup]] = [{} for _ in histories]
    logged = dict.fromkeys(itertools.chain.from_iterable(itertools.chain(*histories)))
    for name in (name for name in logged if name.endswith((_LESS, *_GREATER))):
        sign = 1 if name.endswith(_LESS) else -1
        best = dict[int, tuple[float, int]]()
        for place, history in enumerate(histories):
            values = ((number(entry.get(name)), entry["step"]) for entry in history)
            points = [(sign * value, step) for value, step in values if value is not None]
            best |= {place: min(points)} if points else {}
        is_best = len(best) > 1 and (same or not name.endswith((_LESS, "margins")))
        for place, (value, step) in best.items():
            mark = " " + badge("best", "good") if is_best and value == min(best.values())[0] else ""
            columns[place][name] = escape(f"{brief(sign * value, 5)} (step {step})") + mark
    return columns


def comparison_section(found: Record) -> Section:
    """The answers of a run beside those of other models, as the command ``compare`` found them; empty without it."""
    rows, cards = [], []
    for one in found.get("comparisons", ()):
        rate = "" if one["win_rate"] is None else "{:.1%} ({:.1%} to {:.1%})".format(one["win_rate"], *one["interval"])
        counts = (f"{one[name]:,}" for name in ("prompts", "wins", "ties", "losses"))
        means = (" / ".join(map(brief, one[name] or ())) for name in ("mean_lengths", "mean_rewards"))
        rows.append([one["with"], *counts, rate, *means])
        names, samples = ("this run", one["with"]), []
        for each in one["examples"]:
            texts, scores = map(_cut, each["answers"]), [brief(one) for one in each["scores"] if one is not None]
            samples.append((_cut(each["prompt"]), dict(zip(names, texts)), dict(zip(names, scores))))
        cards.append(html.Card(title="Most different answers", muted=one["with"], samples=samples))
    heads = ("compared with", "prompts", "wins", "ties", "losses", "win rate (95%)", "mean length", "mean reward")
    table = html.Table("Comparison", heads, rows, ("", *["number"] * 7))
    lead = f"Answers to {found.get('prompts')}. Ties count half. The means are of this run, then of the other model."
    return Section("Comparison", lead, [html.Card([table]), *cards] if rows else [])


def _note(view: RunView, state: str) -> tuple[str, str, str] | None:
    if state == "failed" and view.status.error:
        return "bad", "Error.", without_secret_values(view.status.error)
    if state in IN_PROGRESS:
        return "info", "", "This run is in progress; the report shows it as of the time below."
    if state == "unknown" or (state == "finished" and not view.ended_early):
        return None
    tone = {"failed": "bad", "lost": "bad", "finished": "info"}.get(state, "warn")
    return tone, "", f"{view.sentence[0].upper()}{view.sentence[1:]}."


def _tiles(history: Sequence[Record]) -> list[tuple[str, str, str]]:
    """Label, last value, and first value of each tile."""
    found: dict[str, tuple[str, str, str]] = {}
    for metric, label in _TILES.items():
        values = [value for entry in history if (value := number(entry.get(metric))) is not None]
        if values and label not in found:
            found[label] = (label, brief(values[-1]), f"from {brief(values[0])}" if len(values) > 1 else "")
    return list(found.values())[:_MOST_TILES]


def _facts(view: RunView, options: Record, loaded: int | None) -> Iterator[tuple[str, Any]]:
    log, start, status = view.log, view.log.newest("start"), view.status
    epoch, seconds = number(log.last.get("epoch")), _training_seconds(log)
    yield "Model", start.get("model") or options.get("model_name_or_path")
    yield "Steps", f"{status.step:,}" + (f" of {status.total_steps:,}" if status.total_steps else "")
    yield "Weights", loaded and f"of step {loaded}, the best by {options.get('metric_for_best_model') or 'loss'}"
    yield "Epochs", epoch is not None and f"{epoch:.3g}"
    yield "Time", seconds and duration(seconds)
    yield "Tokens", view.tokens and f"{view.tokens:,}"
    yield "Throughput", view.tokens_per_second and f"{view.tokens_per_second:,.0f} tokens/s"
    yield "Rows per step", start.get("window")
    yield "Ranks", f"{status.world_size:,}"
    yield "Started", utc(start.get("time"), 16)
    yield "SLURM job", status.job and status.job + (f", requeued {status.restarts}×" if status.restarts else "")
    for role, _, rest in (text.partition(": ") for text in start.get("models", "").split("; ")):
        yield role.capitalize(), rest


def _training_seconds(log: Log) -> float:
    """The logged total or, before the end, the time spanned by the log without the pauses between attempts."""
    times = [(seconds_of(record["time"]), record.get("event")) for record in log.records if "time" in record]
    spans = [end - begin for (begin, _), (end, event) in itertools.pairwise(times) if event != "resume"]
    return log.totals.get("train_runtime") or sum(spans)


def _best_step(folder: Path, view: RunView, options: Record) -> int | None:
    """Step of the best checkpoint, if a metric chooses it."""
    if not (options.get("load_best_model_at_end") or options.get("metric_for_best_model")):
        return None
    places = [folder, *(folder / one.name for one in view.checkpoints[:1])]
    states = [read_object(place / "trainer_state.json") for place in places]
    return next((step for state in states if (step := state.get("best_global_step")) is not None), None)


def changed_options(options: Mapping[str, Any], declared: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, value and default ("" if unknown) of the options that differ from those of the class."""
    defaults = {one.name: default_of(one) for one in option_fields(declared)}
    ignored = judged_names(declared)
    for name, value in options.items():
        if value is not None and value != defaults.get(name) and name not in ignored:
            yield name, value, defaults.get(name, "")


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _cut(without_secret_values(text), _LONGEST_VALUE)


def _cut(text: str, longest: int = _LONGEST_TEXT) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _data(one: Record) -> html.Card:
    rows = {"read": one.get("rows_in"), "kept": one.get("rows_out")}
    rows |= {f"dropped: {reason}": count for reason, count in one.get("dropped", {}).items()}
    rows |= {text: one.get(key) or None for key, text in _DATA_COUNTS.items()}
    counted = [(name, f"{count:,}") for name, count in rows.items() if count is not None]
    tables = [html.Table(f"Rows of the {one['role']} data", ("rows", "count"), counted, ("", "number"))]
    if lengths := one.get("lengths"):
        heads = ["tokens", *next(iter(lengths.values()))]
        each = [[name, *(f"{value:,}" for value in values.values())] for name, values in lengths.items()]
        tables.append(
            html.Table(f"Token counts of the {one['role']} data", heads, each, ["", *["number"] * len(heads)])
        )
    return html.Card(tables, one["role"].capitalize(), lead=one["where"])


def _attempt(event: Record) -> tuple[str, ...]:
    begins = "scratch" if event.get("event") == "start" else f"{event.get('checkpoint')}, step {event.get('step')}"
    return str(event.get("attempt") or 1), utc(event.get("time"), 16), begins, str(event.get("world_size", ""))


def _samples(path: Path) -> Iterator[html.Card]:
    """The completions of the last step, beside those of the first step for the same prompts, by evaluation set."""
    rows = [row for row in read_lines(path) if "step" in row and "prompt" in row]
    first, last = ({(row.get("dataset"), row["prompt"]): row for row in rows if row["step"] == rows[place]["step"]}
                   for place in (0, -1))  # fmt: skip
    groups = dict[str, list[Any]]()
    for (dataset, prompt), row in last.items():
        before, name = first.get((dataset, prompt), row), (dataset or "").removeprefix("eval").removeprefix("_")
        steps = f"Before and after: steps {before['step']} and {row['step']}"
        title = (f"Step {row['step']}" if before["step"] == row["step"] else steps) + (f", {name}" if name else "")
        earlier, texts = _texts(before), dict[str, str]()
        for label, text in _texts(row).items():  # what has not changed, such as the reference's, once
            if (old := earlier.get(label, text)) == text:
                texts[label] = text
            else:
                texts |= {f"{label}, step {before['step']}": old, f"{label}, step {row['step']}": text}
        scores = {label.replace("_", " "): brief(value) for label, each in row.items()
                  if label != "step" and (value := number(each)) is not None}  # fmt: skip
        groups.setdefault(title, []).append((_cut(prompt), texts, scores))
    for title, each in groups.items():
        cut = f"{_MOST_PROMPTS} of {len(each)} prompts; all of them are in completions.jsonl."
        yield html.Card(title=title, lead=cut if len(each) > _MOST_PROMPTS else "", samples=each[:_MOST_PROMPTS])


def _texts(row: Record) -> dict[str, str]:
    found = {name: text for name, text in row.items() if isinstance(text, str) and name not in ("prompt", "dataset")}
    return {"policy" if name == "completion" else name.replace("_", " "): _cut(text) for name, text in found.items()}


def _messages(view: RunView) -> Iterator[tuple[str, str]]:
    for name, said in _EVENTS.items():
        if found := [event for event in view.log.events if event["event"] == name]:
            at = f", the first in step {found[0]['step']}" if "step" in found[0] else ""
            yield "warning", f"{said}: {len(found)}{at}. See log.jsonl."
    yield from (("warning", problem) for problem in view.problems)
    for event in (view.log.newest("start"), view.log.ended):
        yield from (("advice", text) for text in event.get("advice", ()))


def _without_secrets(found: Record) -> Record:
    return {name: value for name, value in found.items() if not is_secret(name)}


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
