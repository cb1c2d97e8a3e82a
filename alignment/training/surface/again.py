"""A second ``train()`` of the same trainer."""

from __future__ import annotations

import dataclasses
import uuid

from transformers import TrainerControl, TrainerState

from alignment.config.errors import OptionError
from alignment.engines.optimizers import build_scheduler
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines
from alignment.training.run_state import Identity


def begin_again(context: RunContext, engines: RunEngines, identity: Identity, steps: int, resumes: bool) -> None:
    """Let a run begin with the weights that the last one left: at step 0, with a schedule and a log of its own.

    The optimizer keeps its moments and a reference its weights, as in transformers; so does a schedule that was given.

    Args:
        context: the run.
        engines: its engines.
        identity: gets a new name.
        steps: length of the schedule.
        resumes: whether it was to go on from a checkpoint.

    Raises:
        OptionError: it was, or the trained weights were released.
    """
    if engines.models is None:
        raise OptionError(
            "train: close() released the trained weights; call save_model before it, then make another trainer"
        )
    if resumes:
        raise OptionError(
            "train: this trainer has trained already, so its engines are not as they were given; to resume from a "
            "checkpoint, make another trainer"
        )
    fresh = TrainerState()
    for field in dataclasses.fields(fresh):
        if not field.name.endswith("process_zero"):
            setattr(context.state, field.name, getattr(fresh, field.name))
    context.events.control = TrainerControl()
    identity.name, identity.attempt = uuid.uuid4().hex, 1
    context.phases.load_state_dict({"records": {}})
    if engines.optimizers[1] is None:
        optimizer = engines.policy.scheduler.optimizer
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        engines.follow(build_scheduler(optimizer, context.args, steps))
