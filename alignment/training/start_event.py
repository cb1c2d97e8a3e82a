"""The ``start`` event of ``log.jsonl``: which run it is, on which data, with which models and libraries.

What is known about the data, counts of rows and percentiles of lengths, is also shown by the dry run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from alignment.run.ranks import world_size
from alignment.training.context import RunContext
from alignment.training.data import PreparedData
from alignment.training.run_engines import RunEngines
from alignment.training.run_manifest import library_versions

PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}


def token_lengths(data: PreparedData, completions: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return percentiles of numbers of tokens by what is counted; ``completions`` are the method's columns."""
    prompt, counts = data.table.prompt, data.table.completions
    lengths = {"prompt": prompt} | {shown_name(name): counts[:, i] for i, name in enumerate(completions)}
    if completions:
        lengths["prompt and completion"] = (prompt[:, None] + counts).ravel()
    if data.packs is not None:
        sequences = data.packs.stops - data.packs.begins
        lengths = {"pack": data.packs.tokens, "trained on per pack": counts[:, 0], "sequence": sequences}
    found = {}
    for name, values in lengths.items():
        points = np.percentile(values, list(PERCENTILES.values()), method="higher").tolist()
        found[name] = {key: int(point) for key, point in zip(PERCENTILES, points)}
    return found


def shown_name(column: str) -> str:
    """Return the name of a column of token IDs as users know it."""
    return column.removesuffix("_ids")


def start_event(
    context: RunContext, engines: RunEngines, data: PreparedData, *, run: str, window: int, steps: int
) -> dict[str, Any]:
    """Return the event of a run with this identifier, training data, and numbers of rows per step and of steps."""
    args, report, source = context.args, data.report, engines.plan.source.name
    sets = {"training": data, **{f"evaluation {name}".rstrip(): each for name, each in context.data.eval.items()}}
    facts = []
    for role, each in sets.items():
        counts = {name: count for name, count in asdict(each.report).items() if count}
        lengths = token_lengths(each, context.method.completions)
        facts.append({"role": role, "where": each.where, **counts, "lengths": lengths})
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
        "data": facts,
        "advice": list(context.data.advice),
        "versions": library_versions(),
    }
