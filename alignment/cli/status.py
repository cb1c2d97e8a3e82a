"""The ``status`` command: the status of a run, or of several, read from the files in their output folders."""

from __future__ import annotations

import functools
import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from alignment.cli.output import run_reader
from alignment.config.errors import OutputError, counted
from alignment.config.fields import words
from alignment.reporting.formats import duration, shown, size
from alignment.reporting.run_view import IN_PROGRESS, Record, RunView, read_run, runs_in, seconds_of, utc
from alignment.run.status_file import STATUS

_ABOUT = """\
Show the status of a run, read from its output folder: state, step, time left, speed, last metrics, checkpoints and
whether they are complete, attempts, and phase times after its end. A run whose process has died is reported with "no
heartbeat since". For a folder of runs, show one line for each."""
_FIRST = words("loss objective/scores win_rate rewards/margins rewards/accuracies kl grad_norm")
_MOST_METRICS = 10


def main(argv: Sequence[str] | None = None, program: str = "deepspeed-alignment status") -> None:
    """Show the status and exit: 0 on success, 1 if it cannot be read, 2 after a usage error."""
    parser = _parser(program)
    run_reader(functools.partial(_show, parser), parser, argv)


def _parser(program: str) -> ArgumentParser:
    parser = ArgumentParser(prog=program, description=_ABOUT, allow_abbrev=False)
    add = parser.add_argument
    add("run", metavar="RUN", help="output folder of the run, or a folder of such folders")
    add("--json", action="store_true", help="print one JSON object per run; with --follow, one line per change")
    add("--follow", action="store_true", help="show changes until all runs have ended; Ctrl-C does not affect them")
    add("--interval", type=float, metavar="SECONDS", help="refresh interval of --follow [2]")
    return parser


def _show(parser: ArgumentParser, options: Namespace) -> None:
    """Show the runs once or, with ``--follow``, whenever one has changed until all have ended."""
    if options.interval is not None and not (options.follow and 0.1 <= options.interval <= 86400):
        parser.error(f"argument --interval: {options.interval:g}: expected 0.1 to 86400 seconds, with --follow")
    folder, before = Path(options.run).expanduser(), list[str]()
    by_line = options.follow and not sys.stdout.isatty()
    in_place = options.follow and not by_line and not options.json
    while True:
        views = [read_run(path) for path in runs_in(folder)]
        several = views[0].folder != str(folder)
        if options.json:
            lines = [json.dumps(view.to_dict()) for view in views]
        elif by_line:
            lines = [f"{Path(view.folder).name}: " * several + status_line(view) for view in views]
        else:
            lines = status_table(views) if several else status_lines(views[0])
        if changed := [line for line in lines if in_place or line not in before]:
            print("\x1b[H\x1b[J" * in_place + "\n".join(changed), flush=True)  # clears the terminal
        before = lines
        if not options.follow or not any(view.status.state in IN_PROGRESS or view.alive for view in views):
            break
        time.sleep(options.interval or 2.0)
    problems = [f"{view.folder}: {problem}" for view in views for problem in view.problems]
    if unknown := [problem for problem in problems if f": {STATUS}: " in problem]:
        raise OutputError(unknown[0])


def status_line(view: RunView) -> str:
    """State, step, speed and metrics in one line."""
    return "; ".join(text for _, text in _rows(view)[:4] if text)


def status_table(views: Sequence[RunView]) -> list[str]:
    """One line per run, below the names of the columns, and one per file that cannot be read."""
    rows = [("run", "state", "step", "newest metrics", "newest checkpoint")]
    for view in views:
        status, saved = view.status, next((one for one in view.checkpoints if one.complete), None)
        evaluated = (view.evaluation_step or 0) >= (view.metrics_step or 0)
        newest = (view.evaluation, view.evaluation_step) if evaluated else (view.metrics, view.metrics_step)
        age = f"{saved.name}, {duration(time.time() - seconds_of(saved.written))} old" if saved else ""
        step = f"{status.step}/{status.total_steps}" if status.total_steps else str(status.step)
        state = status.state + " early" * bool(view.ended_early)
        rows.append((Path(view.folder).name, state, step, _metrics(*newest, most=2), age))
    widths = [max(map(len, column)) for column in zip(*rows)]
    problems = [f"{view.folder}: {problem}" for view in views for problem in view.problems]
    return [*("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows), *problems]


def status_lines(view: RunView) -> list[str]:
    """Everything about a run, one line per item."""
    title = ": ".join(part for part in (view.status.method, view.folder) if part)
    return [title, *(f"  {name.ljust(12)}{text}" for name, text in _rows(view) if text)]


def _rows(view: RunView) -> list[tuple[str, str]]:
    """Name and text of each row; unknown texts are empty."""
    status, rate, total = view.status, view.steps_per_second, view.status.total_steps
    step = f"{status.step} of {total} ({100 * status.step / total:.0f}%)" if total else str(status.step)
    step += "" if view.eta_seconds is None else f", about {duration(view.eta_seconds)} left"
    speed = [f"{rate:.3g} steps/s" if rate >= 0.1 else f"{1 / rate:.3g} s per step"] if rate else []
    speed += [f"{view.tokens_per_second:,.0f} tokens/s"] if view.tokens_per_second else []
    weights = "" if view.weights_step is None else f"of step {view.weights_step} (load_best_model_at_end)"
    attempt = str(status.attempt)
    attempt += f", {status.stalled} in a row without a newer checkpoint" if status.stalled > 1 else ""
    attempt += f", requeued {counted(status.restarts, 'time')}" if status.restarts else ""
    resumed = ", ".join(str(event["step"]) for event in view.resumes)
    attempt += f"; resumed after step {resumed}" if resumed else ""
    width = max((len(one.name) for one in view.checkpoints), default=0)
    saved = [f"{one.name.ljust(width)}  {one.condition}, {size(one.bytes)}" for one in view.checkpoints]
    writing = "being written" if view.alive else "incomplete: the run ended while writing it"
    saved += [f"{name}  {writing}" for name in view.partial]
    ordered = sorted(((one["seconds"], name) for name, one in view.phases.items()), reverse=True)
    total_s = sum(seconds for seconds, _ in ordered) or 1.0
    phases = [f"{name}: {duration(seconds)} ({100 * seconds / total_s:.0f}%)" for seconds, name in ordered]
    between = "\n" + " " * 14
    return [
        ("state", view.sentence),
        ("step", step),
        ("speed", ", ".join(speed)),
        ("metrics", _metrics(view.metrics, view.metrics_step)),
        ("evaluation", _metrics(view.evaluation, view.evaluation_step)),
        ("weights", weights),
        ("attempt", attempt),
        ("checkpoints", between.join(line.removesuffix(", ") for line in saved)),
        ("phases", between.join(phases)),
        ("report", view.report or ""),
        ("started", utc(status.started)),
        ("updated", utc(status.time)),
        *(("problem", problem) for problem in view.problems),
    ]


def _metrics(metrics: Record, step: int | None, most: int = _MOST_METRICS) -> str:
    texts = shown(metrics)
    first = [name for one in _FIRST for name in (one, f"eval_{one}") if name in texts]
    names = list(dict.fromkeys([*first, *texts]))
    said = ", ".join(f"{name} {texts[name]}" for name in names[:most]).replace("−", "-")
    return f"step {step}: {said}" if said else ""
