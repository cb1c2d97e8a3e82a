"""The report at the end of a run: on the terminal, and as report.md and report.html in the output folder."""

from __future__ import annotations

from alignment.config.errors import counted
from alignment.engines.collectives import gathered
from alignment.engines.phases import over_ranks
from alignment.reporting.durable import replace_text
from alignment.reporting.html.page import Section, metrics_section, phases_section, report_text
from alignment.reporting.progress import memory_gib
from alignment.reporting.report import duration
from alignment.run.console import tell
from alignment.run.ranks import world_size
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines
from alignment.training.run_page import write_page

REPORT = "report.md"
_BOOKKEEPING = ("step", "epoch", "num_tokens")  # keys of log entries that are not metrics


def write_report(context: RunContext, engines: RunEngines, *, show: bool) -> None:
    """Write the report and, with ``show``, print it; collective, since it covers all ranks.

    An error is printed and not raised: a report must not fail a run.
    """
    summaries = gathered(context.phases.summary())
    largest = max(gathered(memory_gib(engines.window_pass.device)))
    if not context.is_first:
        return
    try:
        _write(context, engines, over_ranks(summaries), largest, show)
    except Exception as error:
        tell(f"could not write {REPORT}: {type(error).__name__}: {error}")
    write_page(context.output_dir, "finished")


def _write(
    context: RunContext, engines: RunEngines, phases: dict[str, dict[str, float]], largest: float, show: bool
) -> None:
    title = f"{context.args.method}: {context.args.run_name or context.output_dir.name}"
    cuda = engines.window_pass.device.type == "cuda"
    facts = _facts(context, engines, int(phases.get("train", {}).get("tokens", 0)), largest)
    evaluation = {name.removeprefix("eval_"): value for name, value in _evaluation(context).items()}
    sections = [
        phases_section(phases, "GPU memory" if cuda else "resident memory"),
        metrics_section([("Training", None, _last(context, "loss")), ("Evaluation", None, evaluation)]),
        Section("Advice", messages=[("advice", text) for text in context.data.advice]),
    ]
    text = report_text(title, facts, sections)
    replace_text(context.output_dir / REPORT, text)
    if show:
        tell(f"\n{text}")


def _facts(context: RunContext, engines: RunEngines, tokens: int, largest_gib: float) -> list[tuple[str, str]]:
    state, data = context.state, context.data.train
    facts = [("models", engines.plan.describe())]
    facts += engines.window_pass.facts
    if data is not None and context.data.sampler is not None:
        window, ranks = context.data.sampler.window, counted(world_size(), "rank")
        facts += [
            ("data", f"{data.where}: {data.report.summary()}"),
            ("steps", f"{state.global_step} of {state.max_steps}, up to {window} rows each, {ranks}"),
        ]
    if context.args.load_best_model_at_end and state.best_global_step is not None:
        name = context.args.metric_for_best_model
        facts.append(("weights", f"of step {state.best_global_step}, the best by {name}: {state.best_metric:.6g}"))
    times = _last(context, "train_runtime")
    if times:
        seconds = times["train_runtime"]
        facts.append(
            ("time", f"{duration(seconds)}: {tokens:,} tokens trained on, {tokens / seconds:,.0f} per second")
        )
    reduced = context.method.reduced_windows
    if times.get(reduced):
        facts.append((reduced.replace("_", " "), f"{times[reduced]:.0f} of {state.global_step}"))
    if times.get("bad_steps"):
        facts.append(("bad steps", f"{times['bad_steps']:.0f}: no update was made with their windows; see log.jsonl"))
    if times.get("retries"):
        facts.append(("retries", f"{times['retries']:.0f} of reads of data and reward calls; see log.jsonl"))
    facts.append(("largest process", f"{largest_gib:.2f} GiB"))
    return facts


def _evaluation(context: RunContext) -> dict[str, float]:
    """The evaluation of the weights that the run ends with: of every set, each of which is an entry of its own."""
    step = context.state.best_global_step if context.args.load_best_model_at_end else None
    entries = [e for e in context.state.log_history if any(name.startswith("eval_") for name in e)]
    if step is None and entries:
        step = entries[-1]["step"]
    found = {name: value for entry in entries if entry["step"] == step for name, value in entry.items()}
    return {name: value for name, value in found.items() if name not in _BOOKKEEPING}


def _last(context: RunContext, sign: str) -> dict[str, float]:
    """The log's newest entry with a name that begins with ``sign``, without its bookkeeping."""
    for entry in reversed(context.state.log_history):
        if any(name.startswith(sign) for name in entry):
            return {name: value for name, value in entry.items() if name not in _BOOKKEEPING}
    return {}
