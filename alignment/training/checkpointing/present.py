"""A run as it is now, to be compared with what it was when a checkpoint was written."""

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
    """What a run is now, to be compared with what it was.

    Attributes:
        method: of alignment.
        window: rows of one optimizer step.
        micro_batch: rows of one micro-batch and rank.
        total_steps: of the whole run.
        fingerprints: see :mod:`.fingerprints`.
        options: those that have to stay the same.
    """

    method: str
    window: int
    micro_batch: int
    total_steps: int
    fingerprints: Mapping[str, str]
    options: Mapping[str, Any]


def present_run(context: RunContext, plan: EnginePlan, reference: ModelSource | None, resources: Resources) -> Present:
    """What the numbers of a run come from; collective where a live model is partitioned.

    Args:
        context: the run, which has data to train on.
        plan: its models.
        reference: the reference's model; None where there is none, or where it is the policy as given.
        resources: what the method needs besides.
    """
    args, sampler = context.args, context.sampler
    assert sampler is not None
    return Present(
        method=args.method,
        window=sampler.window,
        micro_batch=args.per_device_train_batch_size,
        total_steps=total_steps(args, sampler),
        fingerprints=fingerprints(context, plan, reference, resources.fingerprints()),
        options=compared_options(args),
    )
