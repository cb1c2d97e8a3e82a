"""One optimizer step: a window's gradient, its checks, and the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from alignment.data.batching import AnyBatch
from alignment.data.windows import WindowCounts, WindowPlan
from alignment.internals.torch import schedule_may_go_first
from alignment.training.context import RunContext
from alignment.training.data import PreparedData
from alignment.training.interruptions.faults import BadSteps, NonFiniteGradient
from alignment.training.interruptions.overflows import Overflows
from alignment.training.run_engines import RunEngines
from alignment.training.window import BadStep, Items

_NO_ROWS = WindowCounts(0, 0, 0, 0, 0)


class Taken(NamedTuple):
    """A completed step: its metrics and counts, empty if its window was omitted, and the gradient norm."""

    items: Items
    counts: WindowCounts
    grad_norm: float


class OptimizerStep:
    """Takes optimizer steps.

    Args:
        context: the run.
        engines: its engines.
        data: the training data.
        faults: detects bad steps, and knows the omitted windows.
        overflows: handles overflows of fp16 gradients.
    """

    def __init__(
        self, context: RunContext, engines: RunEngines, data: PreparedData, faults: BadSteps, overflows: Overflows
    ) -> None:
        self.context, self.engines, self.data = context, engines, data
        self.faults, self.overflows = faults, overflows

    def __call__(self, plan: WindowPlan, batches: Sequence[AnyBatch]) -> Taken:
        """Compute a window and update the weights.

        Raises:
            BadStep: if no update was made; on every rank.
            Cut: if the run was asked to stop; on every rank, before any weight has changed.
        """
        events, state = self.context.events, self.context.state
        if self.faults.omits(plan, state.global_step + 1):
            return self.left_out()
        items, counts = self.engines.window_pass(
            plan, batches, self.data, train=True, between=lambda: events("on_substep_end")
        )
        if not counts.rows:
            return Taken(items, counts, self._pass_over())
        self.faults.check(items["loss"][0])
        grad_norm = self._update()
        self.faults.good(items["loss"][0])
        return Taken(items, counts, grad_norm)

    def _update(self) -> float:
        """Apply the gradient; return its norm."""
        events, policy = self.context.events, self.engines.policy
        events("on_pre_optimizer_step")
        with self.context.phases("step"):
            grad_norm = policy.step()
        while not math.isfinite(grad_norm) and policy.scales_loss:
            grad_norm = self._at_lower_scale()
        if not math.isfinite(grad_norm):
            raise NonFiniteGradient(
                f"the gradient norm is {grad_norm} although the loss is finite; no update was made. Likely causes: a "
                "learning_rate that is too high, or a value that overflows in the backward pass"
            )
        events("on_optimizer_step")
        return grad_norm

    def _at_lower_scale(self) -> float:
        """Recompute the gradient of the window that overflowed and apply it; return its norm."""
        policy = self.engines.policy
        self.overflows.lower_scale(policy, self.context.state.global_step + 1)
        self.engines.window_pass.repeat()
        with self.context.phases("step"):
            return policy.step()

    def discard(self, fault: BadStep) -> None:
        """Discard the gradient of a bad step."""
        if not fault.discarded:
            self.engines.policy.discard()
            fault.discarded = True

    def left_out(self) -> Taken:
        """Complete a step without an update, for an omitted window."""
        return Taken({}, _NO_ROWS, self._pass_over())

    def _pass_over(self) -> float:
        """Complete a step of a window without anything to train on: only the schedule advances."""
        with schedule_may_go_first():
            self.engines.policy.scheduler.step()
        return 0.0
