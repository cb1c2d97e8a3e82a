"""Bad steps: a loss or gradient that is not finite or a loss spike, and how a run responds to them.

The decision uses only values that are equal on all ranks, so that all ranks do the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from alignment.config.errors import TrainingError
from alignment.config.options_faults import FaultOptions
from alignment.data.windows import WindowPlan

# The largest and the smallest number of losses that the running median is computed from.
_MOST, _LEAST = 100, 10
# A spike also exceeds the median by this many median absolute deviations: about 7 standard deviations of normal noise.
_DEVIATIONS = 10
WindowId = tuple[int, int]  # epoch, and index within the epoch


class BadStep(TrainingError):
    """A step that must not change any weight, and has not. Raised on every rank.

    Attributes:
        kind: what is wrong, in two words.
        discarded: whether the engine no longer holds its gradient.
    """

    kind = ""
    discarded = False


class NonFiniteLoss(BadStep):
    """A window's loss is inf or nan."""

    kind = "non-finite loss"


class LossSpike(BadStep):
    """A window's loss is far above the loss of preceding steps."""

    kind = "loss spike"


class NonFiniteGradient(BadStep):
    """The norm of a window's gradient is inf or nan although its loss is finite."""

    kind = "non-finite gradient"
    discarded = True


class BadSteps:
    """The bad steps of a run and the windows that it omits; part of its state.

    Args:
        args: the run's options.
        rows: returns a window's rows, numbered as in the user's data.
        tell: prints a line on the first rank.
        record: adds a line to the log.

    Attributes:
        count: number of bad steps that did not end the run.
        omitted: windows that are skipped; only a run begun with ``on_bad_step: rewind`` of an earlier version has any.
    """

    def __init__(
        self,
        args: FaultOptions,
        rows: Callable[[WindowPlan], list[Any]],
        tell: Callable[[str], None],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        self.args = args
        self._rows, self._tell, self._record = rows, tell, record
        self._losses: list[float] = []
        self.count, self.omitted = 0, list[WindowId]()

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of the running median, and both attributes."""
        return {"losses": self._losses, "count": self.count, "omitted": [list(one) for one in self.omitted]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self._losses = list(state["losses"])
        self.count, self.omitted = state["count"], [(epoch, step) for epoch, step in state["omitted"]]

    @property
    def metrics(self) -> dict[str, float]:
        """Return the number of bad steps for the log, if there are any."""
        return {"bad_steps": float(self.count)} if self.count else {}

    def omits(self, plan: WindowPlan, step: int) -> bool:
        """Whether a window is skipped, with a message; ``step`` is the optimizer step that it would be."""
        if (plan.epoch, plan.step) not in self.omitted:
            return False
        self._tell(f"step {step}: skipped window {plan.step + 1} of epoch {plan.epoch + 1}, no update was made")
        self._record({"event": "omitted_window", "step": step, "window": [plan.epoch, plan.step]})
        return True

    def check(self, loss: float) -> None:
        """Check whether the finite loss of a window is in the usual range of this run.

        For positive losses, a spike is a loss of more than ``loss_spike_factor`` times the median. Losses may also be
        negative or near zero, so the distance from the median is measured in units of the median's absolute value, and
        must also exceed the noise.

        Raises:
            LossSpike: if the loss is above this range.
        """
        factor = self.args.loss_spike_factor
        if factor is None or len(self._losses) < _LEAST:
            return
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(one - median) for one in self._losses)
        if loss - median > max((factor - 1) * abs(median), _DEVIATIONS * deviation):
            raise LossSpike(
                f"the loss of this window is {loss:.6g}, but the median of the last {len(self._losses)} is "
                f"{median:.6g} (loss_spike_factor={factor:g}); no update was made. Likely causes: rows unlike the "
                "others, or a learning_rate that is too high"
            )

    def good(self, loss: float) -> None:
        """Record the loss of a completed step."""
        self._losses = [*self._losses, loss][-_MOST:]

    def skip(self, fault: BadStep, plan: WindowPlan, step: int) -> None:
        """Record a bad step that is completed without an update, unless the options say that it ends the run.

        Args:
            fault: the error.
            plan: the window of the step.
            step: the number of the optimizer step.

        Raises:
            BadStep: if the run must end.
        """
        most = self.args.max_bad_steps
        if self.args.on_bad_step == "stop":
            raise fault
        if self.count >= most:
            raise type(fault)(f"{fault}; {self.count} bad steps occurred before (max_bad_steps={most})") from fault
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
                "rows": self._rows(plan),
            }
        )
