"""The ``start`` event of ``log.jsonl``: which run it is, on which data, with which models and libraries."""

from __future__ import annotations

from typing import Any

from alignment.run.ranks import world_size
from alignment.training.context import RunContext
from alignment.training.data import PreparedData
from alignment.training.data_facts import data_facts
from alignment.training.run_engines import RunEngines
from alignment.training.run_manifest import library_versions


def start_event(
    context: RunContext, engines: RunEngines, data: PreparedData, *, run: str, window: int, steps: int
) -> dict[str, Any]:
    """The event.

    Args:
        context: the run.
        engines: its engines.
        data: the training data.
        run: the run's identifier.
        window: rows of a step, at most.
        steps: optimizer steps of the whole run.
    """
    args, report = context.args, data.report
    sets = {"training": data, **{f"evaluation {name}".rstrip(): each for name, each in context.data.eval.items()}}
    source = engines.plan.source.name
    return {
        "event": "start",
        "run": run,
        "run_name": args.run_name or context.output_dir.name,
        "method": args.method,
        "world_size": world_size(),
        "window": window,
        "steps": steps,
        "rows": report.rows_out,
        **({"packs": report.packs} if report.packs else {}),
        "dropped": report.dropped,
        "model": source if isinstance(source, str) else "",
        "models": engines.plan.describe(),
        "device": engines.window_pass.device.type,
        "data": [data_facts(role, each, context.method.completions) for role, each in sets.items()],
        "advice": list(context.data.advice),
        "versions": library_versions(),
    }
