"""The reports of a run that ends: ``report.html`` whatever the reason, ``report.md`` if it is finished."""

from __future__ import annotations

from pathlib import Path

from alignment.config.errors import counted
from alignment.engines.collectives import gathered
from alignment.engines.phases import over_ranks
from alignment.reporting.formats import duration
from alignment.reporting.page import PAGE, Section, metrics_section, phases_section, render, report_text
from alignment.reporting.progress import memory_gib
from alignment.reporting.run_content import read_content
from alignment.reporting.run_view import LOG
from alignment.run.console import tell
from alignment.run.durable import replace_text
from alignment.run.ranks import world_size
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines

REPORT = "report.md"
_BOOKKEEPING = ("step", "epoch", "num_tokens")  # keys of log entries that are not metrics


def write_report(context: RunContext, engines: RunEngines, *, show: bool) -> None:
    """Write both reports and, with ``show``, print the text; collective, since it covers all ranks."""
    summaries, device = gathered(context.phases.summary()), engines.window_pass.device
    largest = max(gathered(memory_gib(device)))
    if not context.is_first:
        return
    try:
        phases = over_ranks(summaries)
        sections = [
            phases_section(phases, "GPU memory" if device.type == "cuda" else "resident memory"),
            metrics_section([("Training", None, _last(context, "loss")), ("Evaluation", None, _evaluation(context))]),
            Section("Advice", messages=[("advice", advice) for advice in context.data.advice]),
        ]
        title = f"{context.args.method}: {context.args.run_name or context.output_dir.name}"
        facts = _facts(context, engines, int(phases.get("train", {}).get("tokens", 0)), largest)
        text = report_text(title, facts, sections)
        replace_text(context.output_dir / REPORT, text)
        tell(f"\n{text}" if show else None)
    except Exception as error:
        tell(f"could not write {REPORT}: {type(error).__name__}: {error}")
    write_page(context.output_dir, "finished")


def _facts(context: RunContext, engines: RunEngines, tokens: int, largest_gib: float) -> list[tuple[str, str]]:
    state, data, sampler = context.state, context.data.train, context.data.sampler
    facts = [("models", engines.plan.describe()), *engines.window_pass.facts]
    if data is not None and sampler is not None:
        rows = f"up to {sampler.window} rows each, {counted(world_size(), 'rank')}"
        facts.append(("data", f"{data.where}: {data.report.summary()}"))
        facts.append(("steps", f"{state.global_step} of {state.max_steps}, {rows}"))
    if context.args.load_best_model_at_end and state.best_global_step is not None:
        name = context.args.metric_for_best_model
        facts.append(("weights", f"of step {state.best_global_step}, the best by {name}: {state.best_metric:.6g}"))
    times = _last(context, "train_runtime")
    if times:
        seconds = times["train_runtime"]
        speed = f"{tokens:,} tokens trained on, {tokens / seconds:,.0f} per second"
        facts.append(("time", f"{duration(seconds)}: {speed}"))
    reduced = context.method.reduced_windows
    for name, said in (
        (reduced, f"of {state.global_step}"),
        ("bad_steps", "(no update was made with their windows; see log.jsonl)"),
        ("retries", "of reads of data and reward calls; see log.jsonl"),
    ):
        if times.get(name):
            facts.append((name.replace("_", " "), f"{times[name]:.0f} {said}"))
    return [*facts, ("largest process", f"{largest_gib:.2f} GiB")]


def _evaluation(context: RunContext) -> dict[str, float]:
    """Return the metrics of the weights that the run ends with: of every set, each of which is an entry of its own."""
    step = context.state.best_global_step if context.args.load_best_model_at_end else None
    entries = [e for e in context.state.log_history if any(name.startswith("eval_") for name in e)]
    step = entries[-1]["step"] if step is None and entries else step
    found = {name: value for entry in entries if entry["step"] == step for name, value in entry.items()}
    return {name.removeprefix("eval_"): value for name, value in found.items() if name not in _BOOKKEEPING}


def _last(context: RunContext, sign: str) -> dict[str, float]:
    """Return the log's newest entry with a name that begins with ``sign``, without its bookkeeping."""
    entries = (e for e in reversed(context.state.log_history) if any(name.startswith(sign) for name in e))
    return {name: value for name, value in next(entries, {}).items() if name not in _BOOKKEEPING}


def write_page(folder: Path, state: str | None = None) -> None:
    """Write ``report.html`` of a run that has begun training; ``state`` is its state if ``status.json`` is older.

    An error is printed and not raised: a report must not fail a run.
    """
    try:
        if (folder / LOG).exists():
            draw_page(folder, state)
    except Exception as error:  # matplotlib, Jinja and the file system have their own exception classes
        tell(f"warning: could not write {PAGE}: {type(error).__name__}: {error}")


def draw_page(folder: Path, state: str | None) -> None:
    """Write the report; unlike :func:`write_page`, raise errors."""
    replace_text(folder / PAGE, render(read_content(folder, state=state).page))
