"""Counters and settings of a training engine: steps, loss scale, parameter groups and schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from alignment.checkpoint.optimizer_state import group_settings, restore_group_settings
from alignment.engines.scoring import PolicyEngine
from alignment.internals.deepspeed_state import counters, loss_scale_state, set_counters, set_loss_scale_state

_PAIRS, _COUNTS = "__pairs__", "__counts__"


class EngineState:
    """The part of the run state that belongs to the engine: counters, loss scale and parameter groups."""

    def __init__(self, policy: PolicyEngine) -> None:
        self.policy = policy

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        engine = self.policy.engine
        return {
            "counters": counters(engine),
            "loss_scale": loss_scale_state(engine),
            "groups": group_settings(self.policy),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; raise CheckpointError if the optimizer has other parameter groups."""
        set_counters(self.policy.engine, state["counters"])
        set_loss_scale_state(self.policy.engine, state["loss_scale"])
        restore_group_settings(self.policy, state["groups"])


class ScheduleState:
    """The state of a learning rate schedule, possibly the user's own, as JSON.

    A mapping whose keys are not strings, such as the ``Counter`` of ``MultiStepLR``, becomes a list of pairs.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save."""
        return {name: _encoded(value) for name, value in self.scheduler.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. A schedule from the options, in which all groups have the same rate, fits any number."""
        found = {name: _decoded(value) for name, value in state.items()}
        if isinstance(self.scheduler, LambdaLR) and len(set(found["_last_lr"])) == 1:
            groups = len(self.scheduler.optimizer.param_groups)
            if groups != len(found["_last_lr"]):
                found |= {name: found[name][:1] * groups for name in ("base_lrs", "_last_lr", "lr_lambdas")}
        self.scheduler.load_state_dict(found)


def _encoded(value: Any) -> Any:
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _encoded(each) for key, each in value.items()}
        kind = _COUNTS if isinstance(value, Counter) else _PAIRS
        return {kind: [[key, _encoded(each)] for key, each in value.items()]}
    return [_encoded(each) for each in value] if isinstance(value, list | tuple) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {_COUNTS}:
            return Counter(dict(value[_COUNTS]))
        pairs = value[_PAIRS] if set(value) == {_PAIRS} else value.items()
        return {key: _decoded(each) for key, each in pairs}
    return [_decoded(each) for each in value] if isinstance(value, list) else value
