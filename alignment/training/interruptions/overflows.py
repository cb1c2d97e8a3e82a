"""fp16 gradients that overflow: the same window again at a lower loss scale, counted and logged, until none is left.

Which of them overflow is decided by norms that all ranks have in common, so that they all do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from alignment.engines.scoring import PolicyEngine
from alignment.training.window import BadStep


class ScaleExhausted(BadStep):
    """A window's gradient overflows in fp16, and the loss scale cannot be lowered."""

    kind = "fp16 overflow"
    discarded = True


class Overflows:
    """The overflows of a run; a part of its state.

    They are no bad steps: the gradient is computed again at the scale that DeepSpeed's scaler comes to, and the step
    is then taken. Only where the scale can fall no further the step is a bad one, and ``on_bad_step`` decides.

    Args:
        tell: prints a line on the first rank.
        record: adds a line to the log.

    Attributes:
        count: how many gradients overflowed.
    """

    def __init__(self, tell: Callable[[str], None], record: Callable[[dict[str, Any]], None]) -> None:
        self._tell, self._record = tell, record
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """The count; the loss scale itself is a part of the engine's state."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.count = state["count"]

    @property
    def metrics(self) -> dict[str, float]:
        """How many gradients overflowed, for the log; nothing in a run without any."""
        return {"overflows": float(self.count)} if self.count else {}

    def lower_scale(self, policy: PolicyEngine, step: int) -> None:
        """Take note of an overflow and lower the loss scale.

        Args:
            policy: the engine whose step it was.
            step: the number of the optimizer step.

        Raises:
            ScaleExhausted: the scale is at its minimum, or is a static one.
        """
        self.count += 1
        before = policy.loss_scale
        if not policy.lower_loss_scale():
            raise ScaleExhausted(
                f"the gradient overflows in fp16 at a loss scale of {before:g}, which cannot be lowered "
                "(fp16.min_loss_scale, or a static fp16.loss_scale, in the DeepSpeed JSON): no update was made. "
                "Likely causes: weights that are broken already, or a model that was trained in bf16 and exceeds "
                "the range of fp16. Set bf16: true, or dtype: float32 where the GPU has no bf16; or lower "
                "fp16.min_loss_scale"
            )
        self._tell(
            f"step {step}: the gradient overflowed in fp16; the window is computed again at a loss scale of "
            f"{policy.loss_scale:g} instead of {before:g} (overflow {self.count})"
        )
        self._record({"event": "overflow", "step": step, "loss_scale": before, "lowered_to": policy.loss_scale})
