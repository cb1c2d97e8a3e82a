"""The end of a run: what it did, on the terminal, and as report.md with curves in the output folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alignment.engines.collectives import gathered
from alignment.engines.launch_env import world_size
from alignment.engines.phases import over_ranks
from alignment.reporting.plots import draw_history
from alignment.reporting.progress import memory_gib
from alignment.reporting.run_report import RunReport, duration

if TYPE_CHECKING:
    from alignment.trainers.base import AlignmentTrainer

REPORT, CURVES = "report.md", "report.png"


def write_report(trainer: AlignmentTrainer, *, show: bool) -> None:
    """Write the report, and with ``show`` print it; collective, for its figures are those of all ranks.

    What goes wrong is told and nothing more: a report must not cost a run its weights.
    """
    summaries = gathered(trainer.phases.summary())
    largest = max(gathered(memory_gib(trainer.window_pass.device)))
    if not trainer.is_world_process_zero():
        return
    try:
        _write(trainer, over_ranks(summaries), largest, show)
    except Exception as error:  # matplotlib and the file system have their own classes
        trainer.tell(f"{REPORT}: could not be written: {type(error).__name__}: {error}")


def _write(trainer: AlignmentTrainer, phases: dict[str, dict[str, float]], largest: float, show: bool) -> None:
    title = f"{trainer.args.method}: {trainer.args.run_name or trainer.output_dir.name}"
    drawn = draw_history(trainer.state.log_history, trainer.output_dir / CURVES, title)
    cuda = trainer.window_pass.device.type == "cuda"
    report = RunReport(
        title=title,
        facts=_facts(trainer, int(phases.get("learn", {}).get("tokens", 0)), largest),
        phases=phases,
        memory="GPU memory" if cuda else "resident memory",
        train=_last(trainer, "loss"),
        evaluation={name.removeprefix("eval_"): value for name, value in _evaluation(trainer).items()},
        advice=trainer.advice,
        plots={"curves": CURVES} if drawn else None,
    )
    (trainer.output_dir / REPORT).write_text(report.markdown(), encoding="utf-8")
    if show:
        trainer.tell(f"\n{report.terminal()}")


def _facts(trainer: AlignmentTrainer, tokens: int, largest_gib: float) -> list[tuple[str, str]]:
    state, data = trainer.state, trainer.train_data
    facts = [("models", trainer.engine_plan.describe(trainer.policy_source, trainer.reference_source))]
    facts += trainer.window_pass.facts
    if data is not None and trainer.sampler is not None:
        window = trainer.sampler.window
        facts += [
            ("data", f"{data.where}: {data.report.summary()}"),
            ("steps", f"{state.global_step} of {state.max_steps}, up to {window} rows each, {world_size()} rank(s)"),
        ]
    if trainer.args.load_best_model_at_end and state.best_global_step is not None:
        name = trainer.args.metric_for_best_model
        facts.append(("weights", f"of step {state.best_global_step}, the best by {name}: {state.best_metric:.6g}"))
    times = _last(trainer, "train_runtime")
    if times:
        seconds = times["train_runtime"]
        facts.append(
            ("time", f"{duration(seconds)}: {tokens:,} tokens trained on, {tokens / seconds:,.0f} per second")
        )
    facts.append(("largest process", f"{largest_gib:.2f} GiB"))
    return facts


def _evaluation(trainer: AlignmentTrainer) -> dict[str, float]:
    """The evaluation of the weights that the run ends with."""
    best = trainer.args.load_best_model_at_end
    return _last(trainer, "eval_", trainer.state.best_global_step if best else None)


def _last(trainer: AlignmentTrainer, sign: str, step: int | None = None) -> dict[str, float]:
    """The log's newest entry (of ``step``) with a name that begins with ``sign``, without its bookkeeping."""
    for entry in reversed(trainer.state.log_history):
        if step in (None, entry["step"]) and any(name.startswith(sign) for name in entry):
            return {name: value for name, value in entry.items() if name not in ("step", "epoch", "num_tokens")}
    return {}
