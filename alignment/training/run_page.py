"""The reports of a run that ends: ``report.html`` whatever the reason, ``report.md`` if it is finished."""

from __future__ import annotations

from pathlib import Path

from alignment.engines.collectives import gathered
from alignment.engines.phases import over_ranks
from alignment.models.tasks import CAUSAL_LM
from alignment.reporting.page import PAGE, as_markdown, render
from alignment.reporting.progress import memory_gib
from alignment.reporting.run_content import read_content
from alignment.reporting.run_view import LOG
from alignment.run.durable import replace_text
from alignment.run.ranks import tell
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines

REPORT = "report.md"
_SECTIONS = ("Phases", "Data", "Final metrics", "Warnings and advice")  # of the page, in the text


def write_report(context: RunContext, engines: RunEngines, *, show: bool) -> None:
    """Write both reports and, with ``show``, print the text; collective, since it covers all ranks."""
    phases = over_ranks(gathered(context.phases.summary()))
    largest = max(gathered(memory_gib(engines.window_pass.device)))
    if not context.is_first:
        return
    try:
        page = read_content(context.output_dir, state="finished", phases=phases).page
        totals: dict[str, float] = next((e for e in reversed(context.state.log_history) if "train_runtime" in e), {})
        counts = ("bad_steps", "retries", context.method.reduced_windows)
        facts = {**page.facts, **dict(engines.window_pass.facts), "Largest process": f"{largest:.2f} GiB"}
        facts |= {name.replace("_", " ").capitalize(): f"{totals[name]:.0f}" for name in counts if totals.get(name)}
        if context.memory_plan is not None:
            facts["GPU memory"] = context.memory_plan.compared(phases)
        if context.method.task is CAUSAL_LM:
            facts["Chat with it"] = f"deepspeed-alignment chat {context.output_dir}"
        sections = [one for title in _SECTIONS for one in page.sections if one.title == title]
        text = as_markdown(page._replace(facts=facts, sections=sections))
        replace_text(context.output_dir / REPORT, text)
        tell(f"\n{text}" if show else None)
    except Exception as error:
        tell(f"could not write {REPORT}: {type(error).__name__}: {error}")
    write_page(context.output_dir, "finished")


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
