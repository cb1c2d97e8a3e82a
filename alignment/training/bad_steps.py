"""Bad steps: a loss or gradient that is not finite or a loss spike, and how a run responds to them.

Decisions use only values that are equal on all ranks, so that all ranks do the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from alignment.checkpoint.run_state import StatefulFields
from alignment.config.errors import TrainingError
from alignment.config.options_training import FaultOptions
from alignment.data.windows import WindowPlan
from alignment.engines.scoring import PolicyEngine

# The largest and the smallest number of losses that the running median is computed from.
_MOST, _LEAST = 100, 10
# A spike also exceeds the median by this many median absolute deviations: about 7 standard deviations of normal noise.
_DEVIATIONS = 10
Tell = Callable[[str], None]
Record = Callable[[dict[str, Any]], None]


class BadStep(TrainingError):
    """A step that must not change any weight, and has not. Raised on every rank.

    Args:
        message: what is wrong, and likely causes.
        kind: the same in two words.
        discarded: whether the engine no longer holds its gradient.
    """

    def __init__(self, message: str, kind: str, *, discarded: bool = False) -> None:
        super().__init__(message)
        self.kind, self.discarded = kind, discarded


class BadSteps:
    """The bad steps of a run and the windows that it omits; part of its state.

    Args:
        args: the run's options.
        rows: returns the numbers in the user's data of the rows or packs of a plan.
        tell: prints a line on the first rank.
        record: adds a line to the log.

    Attributes:
        count: number of bad steps that did not end the run.
        omitted: windows that are skipped; only a run begun with ``on_bad_step: rewind`` of an earlier version has any.
    """

    def __init__(
        self, args: FaultOptions, rows: Callable[[Iterable[int]], list[Any]], tell: Tell, record: Record
    ) -> None:
        self.args = args
        self._rows, self._tell, self._record = rows, tell, record
        self._losses: list[float] = []
        self.count, self.omitted = 0, list[tuple[int, int]]()

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the running median, and both attributes."""
        return {"losses": self._losses, "count": self.count, "omitted": [list(one) for one in self.omitted]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._losses = list(state["losses"])
        self.count, self.omitted = state["count"], [(epoch, step) for epoch, step in state["omitted"]]

    def omits(self, plan: WindowPlan, step: int) -> bool:
        """Whether a window is skipped, with a message; ``step`` is the optimizer step that it would be."""
        if (plan.epoch, plan.step) not in self.omitted:
            return False
        self._tell(f"step {step}: skipped window {plan.step + 1} of epoch {plan.epoch + 1}, no update was made")
        self._record({"event": "omitted_window", "step": step, "window": [plan.epoch, plan.step]})
        return True

    def check(self, loss: float) -> None:
        """Raise BadStep if the finite loss of a window is above the usual range of this run.

        For positive losses, a spike is a loss of more than ``loss_spike_factor`` times the median. Losses may also be
        negative or near zero, so the distance from the median is measured in units of the median's absolute value, and
        must also exceed the noise.
        """
        factor = self.args.loss_spike_factor
        if factor is None or len(self._losses) < _LEAST:
            return
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(one - median) for one in self._losses)
        if loss - median > max((factor - 1) * abs(median), _DEVIATIONS * deviation):
            raise BadStep(
                f"the loss of this window is {loss:.6g}, but the median of the last {len(self._losses)} is "
                f"{median:.6g} (loss_spike_factor={factor:g}); no update was made. Likely causes: rows unlike the "
                "others, or a learning_rate that is too high",
                "loss spike",
            )

    def good(self, loss: float) -> None:
        """Record the loss of a completed step."""
        self._losses = [*self._losses, loss][-_MOST:]

    def skip(self, fault: BadStep, plan: WindowPlan, step: int) -> None:
        """Record a bad optimizer step, which is completed without an update; raise BadStep if it ends the run."""
        most = self.args.max_bad_steps
        if self.args.on_bad_step == "stop":
            raise fault
        if self.count >= most:
            message = f"{fault}; {self.count} bad steps occurred before (max_bad_steps={most})"
            raise BadStep(message, fault.kind, discarded=fault.discarded) from fault
        self.count += 1
        self._tell(f"step {step}: {fault}; its window was skipped (bad step {self.count} of at most {most})")
        self._record(
            {
                "event": "bad_step",
                "step": step,
                "window": [plan.epoch, plan.step],
                "kind": fault.kind,
                "message": str(fault),
                "action": "skip",
                "bad_steps": self.count,
                "rows": self._rows(row for micro in plan.micro_batches for own in micro for row in own.rows),
            }
        )


@dataclass
class Overflows(StatefulFields):
    """The number of fp16 gradients that overflowed; part of the state of a run.

    They are not bad steps: the window is repeated at the scale that DeepSpeed's scaler chooses. Only if the scale
    cannot be lowered further is the step a bad one.
    """

    count: int = 0

    def lower_scale(self, policy: PolicyEngine, step: int, tell: Tell, record: Record) -> None:
        """Record an overflow in an optimizer step, and lower the loss scale of the engine.

        Raises:
            BadStep: if the scale is at its minimum, or is static.
        """
        self.count += 1
        before = policy.loss_scale
        if not policy.lower_loss_scale():
            raise BadStep(
                f"the gradient overflows in fp16 at a loss scale of {before:g}, which cannot be lowered "
                "(fp16.min_loss_scale, or a static fp16.loss_scale, in the DeepSpeed JSON); no update was made. "
                "Likely causes: weights that are already corrupted, or a model that was trained in bf16 and exceeds "
                "the range of fp16. Set bf16: true, or dtype: float32 if the GPU does not support bf16; or lower "
                "fp16.min_loss_scale",
                "fp16 overflow",
                discarded=True,
            )
        tell(
            f"step {step}: the gradient overflowed in fp16; repeating the window at a loss scale of "
            f"{policy.loss_scale:g} instead of {before:g} (overflow {self.count})"
        )
        record({"event": "overflow", "step": step, "loss_scale": before, "lowered_to": policy.loss_scale})
