"""Bad steps: a loss or gradient that is not finite, a loss that spikes; and what a run does about them.

What is bad is decided by numbers that all ranks have in common, so that they all do the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from alignment.config.options_faults import FaultOptions
from alignment.data.windows import WindowPlan
from alignment.training.window import BadStep

# The running median is that of so many losses at most, and of so many at least.
_MOST, _LEAST = 100, 10
# A spike is also this many median absolute deviations above the median: about 7 standard deviations of normal noise.
_DEVIATIONS = 10
WindowId = tuple[int, int]  # epoch, and number in it


class LossSpike(BadStep):
    """A window's loss is far above those of the steps before it."""

    kind = "loss spike"


class NonFiniteGradient(BadStep):
    """The norm of a window's gradient is inf or nan, although its loss is finite."""

    kind = "non-finite gradient"
    discarded = True


class BadSteps:
    """What was bad in a run, and the windows that it leaves out for that; a part of its state.

    Args:
        args: the options.
        steps_per_epoch: windows of an epoch.
        rows: the rows of a window, as the user counts them.
        tell: prints a line on the first rank.
        record: adds a line to the log.

    Attributes:
        count: how many steps were bad, of those that did not end the run.
        omitted: the windows that no update was made with.
    """

    def __init__(
        self,
        args: FaultOptions,
        steps_per_epoch: int,
        rows: Callable[[WindowPlan], list[Any]],
        tell: Callable[[str], None],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        self.args, self.steps_per_epoch = args, steps_per_epoch
        self._rows, self._tell, self._record = rows, tell, record
        self._losses: list[float] = []
        self.count, self.omitted = 0, list[WindowId]()

    def state_dict(self) -> dict[str, Any]:
        """The losses that the median is of, and both attributes."""
        return {"losses": self._losses, "count": self.count, "omitted": [list(one) for one in self.omitted]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self._losses = list(state["losses"])
        self.count, self.omitted = state["count"], [(epoch, step) for epoch, step in state["omitted"]]

    @property
    def metrics(self) -> dict[str, float]:
        """How many steps were bad, for the log; nothing in a run without any."""
        return {"bad_steps": float(self.count)} if self.count else {}

    def omits(self, plan: WindowPlan, step: int) -> bool:
        """Whether a window is left out, which is told; ``step`` is the optimizer step that it would be."""
        if (plan.epoch, plan.step) not in self.omitted:
            return False
        self._tell(f"step {step}: window {plan.step + 1} of epoch {plan.epoch + 1} is left out, no update was made")
        self._record({"event": "omitted_window", "step": step, "window": [plan.epoch, plan.step]})
        return True

    def check(self, loss: float) -> None:
        """Whether the finite loss of a window is as high as losses of this run are.

        Above zero, a spike is a loss of more than ``loss_spike_factor`` times the median. Losses may also be negative,
        or near zero: so the measure is the distance from the median, in units of its absolute value, and the distance
        has to be more than noise.

        Raises:
            LossSpike: it is higher.
        """
        factor = self.args.loss_spike_factor
        if factor is None or len(self._losses) < _LEAST:
            return
        median = statistics.median(self._losses)
        deviation = statistics.median(abs(one - median) for one in self._losses)
        if loss - median > max((factor - 1) * abs(median), _DEVIATIONS * deviation):
            raise LossSpike(
                f"the loss of this window is {loss:.6g} where the median of the last {len(self._losses)} is "
                f"{median:.6g} (loss_spike_factor={factor:g}): no update was made. Likely causes: rows unlike the "
                "others, or a learning_rate that is too high"
            )

    def good(self, loss: float) -> None:
        """Take note of the loss of a step that was taken."""
        self._losses = [*self._losses, loss][-_MOST:]

    def rewinds(
        self, fault: BadStep, plan: WindowPlan, step: int, rewind: Callable[[], tuple[str, int] | None]
    ) -> bool:
        """Do what the options say about a bad step.

        Args:
            fault: what is bad.
            plan: its window.
            step: the optimizer step that it would have been.
            rewind: returns to the last checkpoint and gives its name, and how many windows the run had behind it
                there; None where there is no checkpoint.

        Returns:
            Whether the run has returned to a checkpoint; else the step is to be done without an update.

        Raises:
            BadStep: the run ends.
        """
        most = self.args.max_bad_steps
        if self.args.on_bad_step == "stop":
            raise fault
        if self.count >= most:
            raise type(fault)(f"{fault}; {self.count} bad steps came before it (max_bad_steps={most})") from fault
        count, omitted = self.count + 1, self.omitted
        place, trained = (rewind() if self.args.on_bad_step == "rewind" else None) or (None, 0)
        left_out = self._up_to(plan, trained) if place is not None else [(plan.epoch, plan.step)]
        # What a checkpoint holds of these is from before the bad step.
        self.count, self.omitted = count, sorted({*omitted, *left_out})
        done = "its window was skipped"
        if place is not None:
            done = f"the run returned to {place} and leaves out {len(left_out)} window(s)"
        elif self.args.on_bad_step == "rewind":
            done += ", as there is no checkpoint to return to yet"
        self._tell(f"step {step}: {fault}; {done} (bad step {count}, at most {most})")
        self._record(
            {
                "event": "bad_step",
                "step": step,
                "window": [plan.epoch, plan.step],
                "kind": fault.kind,
                "message": str(fault),
                "action": "skip" if place is None else "rewind",
                **({} if place is None else {"checkpoint": place, "omitted": left_out}),
                "bad_steps": count,
                "rows": self._rows(plan),
            }
        )
        return place is not None

    def _up_to(self, plan: WindowPlan, trained: int) -> list[WindowId]:
        """As many windows as a rewind leaves out, this one the last, but none that was trained on and is kept."""
        last = plan.epoch * self.steps_per_epoch + plan.step
        first = max(trained, last + 1 - self.args.rewind_windows)
        return [divmod(number, self.steps_per_epoch) for number in range(first, last + 1)]
