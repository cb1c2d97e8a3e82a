"""The numbers that a training engine counts with: steps, loss scale, and the settings of its parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.engines.checkpoints.optimizer_state import group_settings, restore_group_settings
from alignment.engines.scoring import PolicyEngine
from alignment.internals.deepspeed_state import counters, loss_scale_state, set_counters, set_loss_scale_state


class EngineState:
    """A part of the run state.

    Args:
        policy: the engine.
    """

    def __init__(self, policy: PolicyEngine) -> None:
        self.policy = policy

    def state_dict(self) -> dict[str, Any]:
        """Counters, loss scale and groups."""
        engine = self.policy.engine
        return {
            "counters": counters(engine),
            "loss_scale": loss_scale_state(engine),
            "groups": group_settings(self.policy),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            CheckpointError: the optimizer has other parameter groups.
        """
        set_counters(self.policy.engine, state["counters"])
        set_loss_scale_state(self.policy.engine, state["loss_scale"])
        restore_group_settings(self.policy, state["groups"])
