"""Properties and boundary rows of small tables: checkpoints, metrics, resumed runs, messages and callbacks."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from alignment import CPOConfig
from alignment.checkpoint.best import BestModel, check_best_metric
from alignment.checkpoint.folder import prune_checkpoints
from alignment.checkpoint.manifest import Manifest
from alignment.checkpoint.resume import Checkpoint, check_same_run
from alignment.config.deepspeed_keys import check_keys
from alignment.config.errors import OptionError, setting
from alignment.reporting.metrics import REWARDS, MetricSums, add_rewards, add_sides, means
from alignment.run.ending import describe
from alignment.run.stop import REQUESTS, StopReason
from alignment.training import callbacks, trainer
from alignment.training.callbacks import Decision, Events

VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, math.nan, math.inf])


@given(
    values=st.lists(VALUES, min_size=1, max_size=8),
    greater=st.booleans(),
    metric=st.sampled_from(["loss", "eval_loss"]),
)
def test_the_best_is_the_first_of_the_best_finite_values(values: list[float], greater: bool, metric: str) -> None:
    state = TrainerState()
    args = CPOConfig(output_dir="out", metric_for_best_model=metric, greater_is_better=greater)
    best = BestModel(args, state)
    for state.global_step, value in enumerate(values, start=1):
        before = state.best_metric
        better = before is None or (value > before if greater else value < before)
        assert best.improved({"eval_loss": value, "eval_other": -1e9}) == (better and math.isfinite(value))
        best.saved(Path(f"checkpoint-{state.global_step}"))
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        assert (state.best_metric, state.best_model_checkpoint) == (None, None)
        return
    wanted = max(finite) if greater else min(finite)
    first = values.index(wanted) + 1
    assert (state.best_metric, state.best_global_step) == (wanted, first)
    assert state.best_model_checkpoint == f"checkpoint-{first}"


@pytest.mark.parametrize("needed", [True, False])
def test_a_checkpoint_that_was_not_written(needed: bool) -> None:
    """The best before it counts again if its weights are needed; otherwise, only the path is undone."""
    strategy = {"save_strategy": "best"} if needed else {"save_strategy": "steps", "save_steps": 1}
    args = CPOConfig(output_dir="out", metric_for_best_model="loss", eval_strategy="steps", eval_steps=1, **strategy)
    state = TrainerState()
    best = BestModel(args, state)
    assert best.saves == needed
    for state.global_step, value, written in ((1, 3.0, True), (2, 2.0, False), (3, 4.0, False)):
        best.improved({"eval_loss": value})
        best.saved(Path(f"checkpoint-{state.global_step}"))
        if not written:
            best.lost()
    assert state.best_model_checkpoint == "checkpoint-1"
    assert (state.best_metric, state.best_global_step) == ((3.0, 1) if needed else (2.0, 2))


@given(
    steps=st.sets(st.integers(1, 12), max_size=6),
    limit=st.one_of(st.none(), st.integers(1, 7)),
    keep=st.one_of(st.none(), st.integers(1, 12)),
)
def test_pruning_keeps_the_newest_and_the_best_within_the_limit(
    steps: set[int], limit: int | None, keep: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for step in steps:
            (Path(folder) / f"checkpoint-{step}").mkdir()
        prune_checkpoints(Path(folder), limit, None if keep is None else Path(folder) / f"checkpoint-{keep}")
        left = {int(path.name.removeprefix("checkpoint-")) for path in Path(folder).iterdir()}
    if limit is None or not steps:
        assert left == steps
        return
    never = {max(steps), keep} & steps
    assert never <= left
    assert len(left) == min(len(steps), max(limit, len(never)))
    assert all(step in left or step < min(left - never, default=13) for step in steps), "the oldest go first"


NUMBERS = st.integers(-64, 64).map(lambda number: number / 8)  # exact sums in any order


@given(pairs=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=7), cut=st.integers(0, 7))
def test_metrics_of_pairs_do_not_depend_on_the_split(pairs: list[tuple[float, float]], cut: int) -> None:
    """Tied rewards count as incorrect, as in TRL."""
    sums = MetricSums(("rewards/chosen", "rewards/rejected", "rewards/accuracies"), torch.device("cpu"), True)
    for part in (pairs[:cut], pairs[cut:]):
        chosen, rejected = (torch.tensor([pair[side] for pair in part]) for side in (0, 1))
        add_rewards(sums, chosen, rejected)
    found, count = means(sums.items()), len(pairs)
    first, second = sum(c for c, _ in pairs) / count, sum(r for _, r in pairs) / count
    expected = {"rewards/chosen": first, "rewards/rejected": second, "rewards/margins": first - second}
    assert found == {**expected, "rewards/accuracies": sum(c > r for c, r in pairs) / count}


def test_sides_with_and_without_weights() -> None:
    names = ("logps/chosen", "logps/rejected", "logits/chosen", "logits/rejected")
    sums = MetricSums(names, torch.device("cpu"), True)
    values = torch.tensor([1.0, 2.0, 4.0, 8.0])
    add_sides(sums, "logps", values)
    add_sides(sums, "logits", values, torch.tensor([1, 3, 2, 4]))
    assert sums.items() == {
        "logps/chosen": (3.0, 2.0), "logps/rejected": (12.0, 2.0),
        "logits/chosen": (3.0, 4.0), "logits/rejected": (12.0, 6.0),
    }  # fmt: skip


def test_sums_and_counts_of_both_classes() -> None:
    items = {"rewards/chosen": (3.0, 2.0), "rewards/rejected": (0.0, 0.0), "logps/chosen": (-4.0, 2.0), "kl": (0.5, 1)}
    assert means(items, sums=True) == {
        "rewards/chosen": 1.5, "logps/chosen": -2.0, "kl": 0.5, "count/chosen": 2.0, "count/rejected": 0.0,
        "rewards/chosen_sum": 3.0, "rewards/rejected_sum": 0.0, "logps/chosen_sum": -4.0,
    }  # fmt: skip


# Resuming ------------------------------------------------------------------------------------------------------------


CURRENT = Manifest("", 0, "kto", 1, 0, 8, 50, True, {}, {"data": "a"}, {"beta": 0.1}, {})
CHECKPOINT = Checkpoint(Path("checkpoint-4"), replace(CURRENT, run="r", step=4))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"total_steps": 51}, None),
        ({"total_steps": 49}, "the number of steps was 50, is 49"),
        ({"options": {"beta": 0.2}}, "beta was 0.1, is 0.2"),
        ({"options": {}}, None),
        ({"options": {"beta": 0.1, "x": "y"}}, "x was missing, is y"),
        ({"options": {"beta": 0.1, "x": None}}, None),
        ({"fingerprints": {"data": "b"}}, "data was a, is b"),
        ({"fingerprints": {"data": "a (elsewhere)"}}, None),
        ({"options": {"beta": 0.1, "metric_for_best_model": "loss"}}, None),
    ],
)
def test_differences_between_a_run_and_its_checkpoint(
    changes: dict[str, Any], said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    current = replace(CURRENT, **changes)
    if said is not None:
        with pytest.raises(OptionError, match="^resume_from_checkpoint: checkpoint-4 ") as caught:
            check_same_run(CHECKPOINT, current, anyway=False)
        assert said in str(caught.value)
    check_same_run(CHECKPOINT, current, anyway=True)
    assert capsys.readouterr().out.splitlines() == ([] if said is None else [f"resume_anyway: {said}"])


def test_another_window_is_never_accepted() -> None:
    with pytest.raises(OptionError, match="a step has 9 rows .* had 8; set .*gradient_accumulation_steps"):
        check_same_run(CHECKPOINT, replace(CURRENT, window=9), anyway=True)


def test_what_the_log_says_of_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` and the report read these keys."""
    monkeypatch.setattr(trainer, "restore", lambda *_: None)
    monkeypatch.setattr(trainer, "BestModel", lambda *_: SimpleNamespace(moved_to=lambda folder: None))
    monkeypatch.setattr(trainer.ACTIVITY, "status", None)
    run: Any = SimpleNamespace(
        context=SimpleNamespace(run_state=None, identity=SimpleNamespace(name="r", attempt=3)),
        planned=SimpleNamespace(engines=SimpleNamespace(policy={"zero_optimization": {"stage": 2}})),
        engines=None, args=None, state=None,
        folder=SimpleNamespace(set_newer_aside=lambda step: None),
    )  # fmt: skip
    expected = {"run": "r", "attempt": 3, "checkpoint": "checkpoint-4", "world_size": 1, "stage": 2}
    assert trainer.AlignmentTrainer._restore(run, CHECKPOINT, 9, CURRENT) == expected


# Callbacks and advice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_requests_of_every_rank_count(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's callbacks request a save and a log, and it was asked to stop by the user."""
    events = Events(CPOConfig("out"), TrainerState(), [], None)
    theirs = [0.0, 0.0, 1.0, 0.0, 1.0, float(StopReason.SIGINT)]
    monkeypatch.setattr(callbacks, "world_size", lambda: ranks)
    monkeypatch.setattr(
        callbacks, "largest_numbers", lambda own: [max(pair) for pair in zip(own, theirs, strict=True)]
    )
    events.control.should_evaluate = True
    REQUESTS.request(StopReason.SIGTERM)
    try:
        found = events.decide()
    finally:
        REQUESTS.forget()
    if ranks == 1:
        assert found == Decision(evaluate=True, leave=StopReason.SIGTERM)
    else:
        assert found == Decision(save=True, evaluate=True, log=True, leave=StopReason.SIGINT)
        assert events.control.should_save and events.control.should_log and not events.control.should_epoch_stop
    assert events.decide().leave == (None if ranks == 1 else StopReason.SIGINT)


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
