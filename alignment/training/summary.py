"""The report at the end of a run: on the terminal, and as report.md and report.html in the output folder."""

from __future__ import annotations

from alignment.config.errors import counted
from alignment.engines.collectives import gathered
from alignment.engines.phases import over_ranks
from alignment.reporting.durable import replace_text
from alignment.reporting.progress import memory_gib
from alignment.reporting.report import duration, report_text
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
    summaries, device = gathered(context.phases.summary()), engines.window_pass.device
    largest = max(gathered(memory_gib(device)))
    if not context.is_first:
        return
    try:
        phases = over_ranks(summaries)
        text = report_text(
            title=f"{context.args.method}: {context.args.run_name or context.output_dir.name}",
            facts=_facts(context, engines, int(phases.get("train", {}).get("tokens", 0)), largest),
            phases=phases,
            memory="GPU memory" if device.type == "cuda" else "resident memory",
            train=_last(context, "loss"),
            evaluation=_evaluation(context),
            advice=context.data.advice,
        )
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
