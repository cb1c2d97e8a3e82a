"""What is recorded of a run: in its checkpoints, and in the ``start`` event of ``log.jsonl``.

Most of what a checkpoint records must be the same when the run is resumed. What the event says about the data, counts
of rows and percentiles of lengths, is also shown by the dry run.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from alignment.checkpoint.fingerprints import adapter_fingerprint, fingerprint, model_fingerprint
from alignment.checkpoint.manifest import Manifest
from alignment.compat.trl.verdicts import judged_names
from alignment.config.fields import FREE, marked
from alignment.config.options import AlignmentConfig
from alignment.data.prepare import describe_tokenizer
from alignment.models.source import ModelSource
from alignment.planning.engines import EnginePlan
from alignment.run.ranks import world_size
from alignment.training.context import Resources, RunContext
from alignment.training.data import PreparedData, total_steps
from alignment.training.run_engines import RunEngines

PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
_LIBRARIES = ("deepspeed-alignment", "torch", "transformers", "deepspeed", "peft", "bitsandbytes")


def run_manifest(
    context: RunContext, plan: EnginePlan, reference: ModelSource | None, resources: Resources
) -> Manifest:
    """Return a manifest without the name of the run, step and files; collective if a live model is partitioned.

    ``reference`` is None if there is none, or if it is the policy as given.
    """
    args, sampler = context.args, context.data.sampler
    assert sampler is not None and context.data.train is not None
    found = {"data": _data(context.data.train)}
    for name, data in context.data.eval.items():
        found[f"evaluation data {name}".rstrip()] = _data(data)
    found["tokenizer"] = fingerprint(describe_tokenizer(context.processing_class))
    found["model"] = model_fingerprint(plan.source)
    found["computing dtype"] = plan.dtypes.compute
    if plan.adapters is not None:
        found["adapters"] = adapter_fingerprint(plan.adapters)
    if reference is not None:
        found["reference"] = model_fingerprint(reference)
    found |= {f"reward source {name}": text for name, text in resources.fingerprints().items()}
    return Manifest(
        run="",
        step=0,
        method=args.method,
        world_size=world_size(),
        stage=int(plan.policy["zero_optimization"]["stage"]),
        window=sampler.window,
        total_steps=total_steps(args, sampler),
        resumable=True,
        versions=library_versions(),
        fingerprints=found,
        options=compared_options(args),
        files={},
    )


def _data(data: PreparedData) -> str:
    rows = "rows" if data.packs is None else f"packs by {data.packs.packing.strategy}"
    return f"{len(data.table)} {rows}, {data.key} ({data.where})"


def compared_options(args: AlignmentConfig) -> dict[str, Any]:
    """Return the options that must not change on resume."""
    left_out = marked(type(args), FREE) | judged_names(args)
    compared = {name: value for name, value in args.to_dict().items() if name not in left_out}
    as_read: dict[str, Any] = json.loads(json.dumps(compared, default=str))  # as read back from a manifest
    return as_read


@functools.cache
def library_versions() -> dict[str, str]:
    """Return the versions of the relevant libraries by name."""
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):  # an optional library, or a checkout without installation
            found[name] = version(name)
    return found


def token_lengths(data: PreparedData, completions: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return percentiles of numbers of tokens by what is counted; ``completions`` are the method's columns."""
    prompt, counts = data.table.prompt, data.table.completions
    lengths = {"prompt": prompt} | {shown_name(name): counts[:, i] for i, name in enumerate(completions)}
    if completions:
        lengths["prompt and completion"] = (prompt[:, None] + counts).ravel()
    if data.packs is not None:
        sequences = data.packs.stops - data.packs.begins
        lengths = {"pack": data.packs.tokens, "trained on per pack": counts[:, 0], "sequence": sequences}
    shares = list(PERCENTILES.values())
    points = {name: np.percentile(values, shares, method="higher") for name, values in lengths.items()}
    return {name: dict(zip(PERCENTILES, values.astype(int).tolist())) for name, values in points.items()}


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
