"""Boundary rows of values in messages, and of callbacks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from alignment import CPOConfig
from alignment.checkpoint.best import check_best_metric
from alignment.config.deepspeed_keys import check_keys
from alignment.config.errors import OptionError, setting
from alignment.reporting.metrics import REWARDS
from alignment.run.ending import describe
from alignment.training.callbacks import Events

# Messages ------------------------------------------------------------------------------------------------------------


def test_names_and_values_in_messages_have_a_maximum_length() -> None:
    assert setting("n" * 100, "v" * 98) == f"{'n' * 100}='{'v' * 98}'"
    assert setting("n" * 101, "v" * 99) == f"{'n' * 97}…='{'v' * 96}…"
    for length, shown in ((98, f"'{'v' * 98}'"), (99, f"'{'v' * 96}…")):
        with pytest.raises(OptionError) as caught:
            check_keys({"no_such_key": "v" * length}, "x.json")
        assert str(caught.value).startswith(f"x.json: no_such_key={shown}: no such key")
    for length, shown in ((300, "x" * 300), (301, "x" * 299 + "…")):
        assert describe(ValueError("x" * length))[0].startswith(f"ValueError: {shown} (this is a bug")


@pytest.mark.parametrize(
    ("metric", "sets", "known"),
    [
        (None, [""], True), ("loss", [""], True), ("eval_loss", [""], True), ("loss_eval_", [""], False),
        ("rewards/margins", [""], True), ("eval_rewards/margins", [""], True), ("accuracy", [""], False),
        ("loss", ["a"], False), ("a_loss", ["a", "b"], True), ("eval_b_rewards/chosen", ["a", "b"], True),
    ],
)  # fmt: skip
def test_metrics_that_can_choose_the_best_model(metric: str | None, sets: list[str], known: bool) -> None:
    args = CPOConfig("out", metric_for_best_model=metric, eval_strategy="epoch")
    if known:
        check_best_metric(args, REWARDS, sets)
        return
    with pytest.raises(OptionError, match="^metric_for_best_model="):
        check_best_metric(args, REWARDS, sets)


# Callbacks -----------------------------------------------------------------------------------------------------------


class Counting(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback with a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


class Naming(Counting):
    """One of another class."""


def test_states_of_several_callbacks_of_one_class() -> None:
    args = CPOConfig("out")
    saved = Events(args, TrainerState(), [Counting(3), Naming(7), Counting(5)], None)
    saved.state.global_step, saved.control.should_save = 4, True
    state = json.loads(json.dumps(saved.state_dict()))
    assert "is_world_process_zero" not in state
    again = Events(args, TrainerState(), [Counting(0), Counting(0), Naming(0), Counting(1)], None)
    again.load_state_dict(state)
    assert [one.count for one in again.handler.callbacks if isinstance(one, Counting)] == [3, 5, 7, 1]
    assert again.state.global_step == 4 and again.control.should_save
