"""Properties of the current run, compared with those in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from alignment.models.source import ModelSource
from alignment.planning.engines import EnginePlan
from alignment.training.checkpointing.fingerprints import compared_options, fingerprints
from alignment.training.context import Resources, RunContext
from alignment.training.data import total_steps


@dataclass(frozen=True)
class Present:
    """Properties of the current run that a checkpoint records.

    Attributes:
        method: name of the method.
        window: rows per optimizer step.
        micro_batch: rows per micro-batch and rank.
        total_steps: steps of the whole run.
        fingerprints: see :mod:`.fingerprints`.
        options: options that must not change on resume.
    """

    method: str
    window: int
    micro_batch: int
    total_steps: int
    fingerprints: Mapping[str, str]
    options: Mapping[str, Any]


def present_run(context: RunContext, plan: EnginePlan, reference: ModelSource | None, resources: Resources) -> Present:
    """Return the properties of the run; collective if a live model is partitioned.

    Args:
        context: the run, with training data.
        plan: its models.
        reference: the reference model; None if there is none, or if it is the policy as given.
        resources: the method's further resources.
    """
    args, sampler = context.args, context.data.sampler
    assert sampler is not None
    return Present(
        method=args.method,
        window=sampler.window,
        micro_batch=args.per_device_train_batch_size,
        total_steps=total_steps(args, sampler),
        fingerprints=fingerprints(context, plan, reference, resources.fingerprints()),
        options=compared_options(args),
    )
