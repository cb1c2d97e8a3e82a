"""What the checkpoints of a run record of it, most of which must be the same when the run is resumed."""

from __future__ import annotations

import contextlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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


def library_versions() -> dict[str, str]:
    """Return the versions of the relevant libraries by name."""
    found = {}
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):  # an optional library, or a checkout without installation
            found[name] = version(name)
    return found
