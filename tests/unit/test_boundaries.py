"""Properties and boundary rows of small tables: the best model, pruning, means, pauses, tied rewards."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerState

from alignment import CPOConfig
from alignment.checkpoint.best import BestModel
from alignment.checkpoint.folder import prune_checkpoints
from alignment.reporting.metrics import MetricSums, add_rewards, add_sides, means
from alignment.run.retries import Retries

VALUES = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, math.nan, math.inf])


@given(values=st.lists(VALUES, min_size=1, max_size=8), greater=st.booleans())
def test_the_best_is_the_first_of_the_best_finite_values(values: list[float], greater: bool) -> None:
    state = TrainerState()
    args = CPOConfig(output_dir="out", metric_for_best_model="loss", greater_is_better=greater)
    best = BestModel(args, state)
    for state.global_step, value in enumerate(values, start=1):
        best.improved({"eval_loss": value})
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


@pytest.mark.parametrize(
    ("pause", "pauses"),
    [
        (20.0, [20, 40, 80, 160, 300, 300]),
        (150.0, [150, 300, 300, 300, 300, 300]),
        (400.0, [400] * 6),
        (0.25, [0.25, 0.5, 1, 2, 4, 8]),
    ],
)
def test_pauses_double_up_to_five_minutes(
    pause: float, pauses: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    retries = Retries(6, pause)
    for number, wanted in enumerate(pauses, start=1):
        slept.clear()
        assert retries.again("read", OSError("busy"), number)
        assert sum(slept) == wanted and max(slept) <= 1
        assert f"retry {number} of 6 in {wanted:g} s" in capsys.readouterr().out
    slept.clear()
    assert not retries.again("read", OSError("busy"), 7) and not slept
    assert retries.taken() == 6 and retries.taken() == 0
