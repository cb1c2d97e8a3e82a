"""A second ``train()`` of the same trainer."""

from __future__ import annotations

import uuid

from transformers import TrainerControl, TrainerState

from alignment.config.errors import OptionError
from alignment.engines.optimizers import build_scheduler
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines


def begin_again(context: RunContext, engines: RunEngines, steps: int, resumes: bool) -> None:
    """Start a new run of ``steps`` steps from the weights of the last one, with a new schedule and a new log.

    As in transformers, the optimizer keeps its moments, the reference its weights, and a given schedule continues.

    Raises:
        OptionError: if a resume was requested, or the trained weights were released.
    """
    if engines.models is None:
        raise OptionError(
            "train: close() released the trained weights; save the model first, and create a new trainer"
        )
    if resumes:
        raise OptionError("train: this trainer has already trained; to resume a checkpoint, create a new trainer")
    engines.policy.discard()  # the gradient of a window that an error or Ctrl-C interrupted
    own = {name: value for name, value in vars(context.state).items() if name.endswith("process_zero")}
    vars(context.state).update(vars(TrainerState(**own)))
    context.events.control = TrainerControl()
    context.identity.name, context.identity.attempt = uuid.uuid4().hex, 1
    context.phases.load_state_dict({"records": {}})
    if engines.optimizers[1] is None:
        optimizer = engines.policy.scheduler.optimizer
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        engines.follow(build_scheduler(optimizer, context.args, steps))
