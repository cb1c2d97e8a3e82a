"""The end of a run: what it did, on the terminal, and as report.md with curves in the output folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alignment.config.errors import OutputError
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

    Raises:
        OutputError: it cannot be written.
    """
    summaries = gathered(trainer.phases.summary())
    largest = max(gathered(memory_gib(trainer.window_pass.device)))
    if not trainer.is_world_process_zero():
        return
    title = f"{trainer.args.method}: {trainer.args.run_name or trainer.output_dir.name}"
    drawn = draw_history(trainer.state.log_history, trainer.output_dir / CURVES, title)
    cuda = trainer.window_pass.device.type == "cuda"
    phases = over_ranks(summaries)
    report = RunReport(
        title=title,
        facts=_facts(trainer, int(phases.get("learn", {}).get("tokens", 0)), largest),
        phases=phases,
        memory="GPU memory" if cuda else "resident memory",
        train=_last(trainer, "loss"),
        evaluation={name.removeprefix("eval_"): value for name, value in _last(trainer, "eval_").items()},
        advice=trainer.advice,
        plots={"curves": CURVES} if drawn else None,
    )
    try:
        (trainer.output_dir / REPORT).write_text(report.markdown(), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"output_dir: could not write {trainer.output_dir / REPORT}: {error}") from error
    if show:
        trainer.tell(f"\n{report.terminal()}")


def _facts(trainer: AlignmentTrainer, tokens: int, largest_gib: float) -> list[tuple[str, str]]:
    state, data = trainer.state, trainer.train_data
    facts = [("models", trainer.engine_plan.describe(trainer.policy_source, trainer.reference_source))]
    if data is not None and trainer.sampler is not None:
        window = trainer.sampler.window
        facts += [
            ("data", f"{data.where}: {data.report.summary()}"),
            ("steps", f"{state.global_step} of {state.max_steps}, {window} rows each, {world_size()} rank(s)"),
        ]
    times = _last(trainer, "train_runtime")
    if times:
        seconds = times["train_runtime"]
        facts.append(
            ("time", f"{duration(seconds)}: {tokens:,} tokens trained on, {tokens / seconds:,.0f} per second")
        )
    facts.append(("largest process", f"{largest_gib:.2f} GiB"))
    return facts


def _last(trainer: AlignmentTrainer, sign: str) -> dict[str, float]:
    """The newest entry of the log with a name that begins with ``sign``, without its bookkeeping."""
    for entry in reversed(trainer.state.log_history):
        if any(name.startswith(sign) for name in entry):
            return {name: value for name, value in entry.items() if name not in ("step", "epoch", "num_tokens")}
    return {}
