"""What the training loop adds to the state of a run.

Totals, what is due between two steps, random streams, and the state in which a second ``train()`` of a trainer starts.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from transformers import TrainerControl, TrainerState

from alignment.checkpoint.run_state import StatefulFields
from alignment.config.errors import OptionError
from alignment.data.windows import WindowCounts
from alignment.engines.optimizers import build_scheduler
from alignment.engines.rng import RandomStreams, seed_streams
from alignment.training.context import RunContext
from alignment.training.run_engines import RunEngines


@dataclass
class Totals(StatefulFields):
    """Sums over a run, for rates, means and the log.

    Attributes:
        tokens, rows: tokens and rows trained on.
        reduced_windows, reduced_in_a_row: windows computed in a reduced form, and those since the last that was not.
        loss_sum, losses: sum of the losses of all windows, and the number of windows with a loss.
        seconds: duration of the run before it was restarted.
        last: values of the newest step, such as its learning rate.
    """

    tokens: int = 0
    rows: int = 0
    reduced_windows: int = 0
    reduced_in_a_row: int = 0
    loss_sum: float = 0.0
    losses: float = 0.0
    seconds: float = 0.0
    last: dict[str, float] = field(default_factory=dict)

    def add(self, items: Mapping[str, tuple[float, float]], counts: WindowCounts) -> None:
        """Add what a window gave: its metrics, without a loss if it was skipped, and the counts of its rows."""
        loss, losses = items.get("loss", (0.0, 0.0))
        self.tokens += counts.sequence_tokens
        self.rows += counts.rows
        self.loss_sum += loss
        self.losses += losses


# What happens between two steps, in this order; "end epoch" is followed by further logs and evaluations if it does.
AFTER_STEP = ("log", "evaluate", "end epoch", "save")
AFTER_EPOCH = ("log", "evaluate")
# In a state written before actions were saved: where the run was interrupted, and what is left to do there.
_LEFT = {"": ["announce save"], "done": [], "step": [*AFTER_STEP], "epoch": [*AFTER_EPOCH, "save"]}


@dataclass
class Boundary(StatefulFields):
    """What is still to be done between two steps.

    Attributes:
        ends: whether the run ends here because of a callback.
        due: actions that are due, in order: those in ``AFTER_STEP``, and ``announce save``, which notifies the
            callbacks of a checkpoint. A checkpoint contains those that its resume must do first.
    """

    ends: bool = False
    due: list[str] = field(default_factory=list)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, also in its older form."""
        self.ends = bool(state["ends"])
        self.due = list(state["due"]) if "due" in state else list(_LEFT[state.get("left", "")])


class RandomAtStart(RandomStreams):
    """Random streams, seeded by the run's seed, that are restored when training continues, not with the other parts.

    What happens in between, such as a callback's ``on_train_begin``, happened before the streams were saved.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._loaded: Mapping[str, Any] | None = None
        self._held: dict[str, Any] | None = None

    def hold(self) -> None:
        """Let :meth:`state_dict` return the present state until :meth:`release`: a step may fail half-way."""
        self._held = super().state_dict()

    def release(self) -> None:
        """Let :meth:`state_dict` return the state at the time of its call: the step was completed."""
        self._held = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the streams, or the held one."""
        return super().state_dict() if self._held is None else self._held

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state until training continues."""
        self._loaded = state

    def redistributed(self, states: Sequence[Any], rank: int) -> Any:
        """Return no state: with a different number of ranks, :meth:`restore` seeds the streams."""
        return {}

    def restore(self, step: int, rank: int) -> None:
        """Continue after ``step``; streams without a state are seeded by seed, step and rank."""
        if self._loaded is None:
            return
        if self._loaded:
            super().load_state_dict(self._loaded)
        else:
            seed_streams(int(np.random.SeedSequence([self.seed, step, rank]).generate_state(1)[0]))
        self._loaded = None


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
