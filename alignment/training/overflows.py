"""Overflows of fp16 gradients: the window is repeated at a lower loss scale until its gradient is finite.

The decision uses only norms that are equal on all ranks, so that all ranks do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from alignment.engines.scoring import PolicyEngine
from alignment.training.bad_steps import BadStep


class ScaleExhausted(BadStep):
    """A window's gradient overflows in fp16, and the loss scale cannot be lowered further."""

    kind = "fp16 overflow"
    discarded = True


class Overflows:
    """The overflows of a run; part of its state.

    They are not bad steps: the gradient is recomputed at the scale that DeepSpeed's scaler chooses, and the step is
    taken. Only if the scale cannot be lowered further is the step a bad one, and ``on_bad_step`` decides.

    Args:
        tell: prints a line on the first rank.
        record: adds a line to the log.

    Attributes:
        count: number of gradients that overflowed.
    """

    def __init__(self, tell: Callable[[str], None], record: Callable[[dict[str, Any]], None]) -> None:
        self._tell, self._record = tell, record
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the count; the loss scale is part of the engine's state."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by :meth:`state_dict`."""
        self.count = state["count"]

    @property
    def metrics(self) -> dict[str, float]:
        """Return the number of overflows for the log, if there are any."""
        return {"overflows": float(self.count)} if self.count else {}

    def lower_scale(self, policy: PolicyEngine, step: int) -> None:
        """Record an overflow and lower the loss scale.

        Args:
            policy: the engine of the step.
            step: the number of the optimizer step.

        Raises:
            ScaleExhausted: if the scale is at its minimum, or is static.
        """
        self.count += 1
        before = policy.loss_scale
        if not policy.lower_loss_scale():
            raise ScaleExhausted(
                f"the gradient overflows in fp16 at a loss scale of {before:g}, which cannot be lowered "
                "(fp16.min_loss_scale, or a static fp16.loss_scale, in the DeepSpeed JSON); no update was made. "
                "Likely causes: weights that are already corrupted, or a model that was trained in bf16 and exceeds "
                "the range of fp16. Set bf16: true, or dtype: float32 if the GPU does not support bf16; or lower "
                "fp16.min_loss_scale"
            )
        self._tell(
            f"step {step}: the gradient overflowed in fp16; repeating the window at a loss scale of "
            f"{policy.loss_scale:g} instead of {before:g} (overflow {self.count})"
        )
        self._record({"event": "overflow", "step": step, "loss_scale": before, "lowered_to": policy.loss_scale})
