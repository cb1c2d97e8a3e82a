"""Which steps are bad, how a run responds, and how many are allowed."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from alignment import CPOConfig
from alignment.config.errors import OptionError
from alignment.data.windows import WindowCounts, WindowPlan
from alignment.training.bad_steps import BadStep, BadSteps

FAULT = BadStep("the gradient norm is nan", "non-finite gradient", discarded=True)


def plan(epoch: int, step: int) -> WindowPlan:
    micro: Any = ((SimpleNamespace(rows=[step, epoch]),),)
    return WindowPlan(epoch, step, micro, (), (), WindowCounts(0, 0, 0, 0, 0))


class Steps(BadSteps):
    """Messages and records are collected."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.told: list[str] = []
        self.lines: list[dict[str, Any]] = []
        args = CPOConfig(output_dir=str(folder), **options)
        super().__init__(args, list, self.told.append, self.lines.append)

    def after(self, losses: list[float]) -> Steps:
        for loss in losses:
            self.good(loss)
        return self

    def is_spike(self, loss: float) -> bool:
        try:
            self.check(loss)
        except BadStep:
            return True
        return False


@pytest.mark.parametrize(
    ("losses", "factor", "highest"),
    [
        ([2.0] * 10, 3, 6.0),  # the factor times the median
        ([1.9, 2.0, 2.1] * 5, 3, 6.0),
        ([1.0, 2.0, 3.0] * 5, 1.5, 12.0),  # ten times the median absolute deviation, which is larger
        ([0.001, -0.001, 0.0] * 5, 3, 0.01),  # near zero, the median is not a suitable scale
        ([-2.0] * 10, 3, 2.0),  # the same distance as for positive losses
        ([0.0] * 10, 3, 0.0),
    ],
)
def test_spike_threshold(losses: list[float], factor: float, highest: float, tmp_path: Path) -> None:
    steps = Steps(tmp_path, loss_spike_factor=factor).after(losses)
    assert not steps.is_spike(highest) and not steps.is_spike(-1e9)
    assert steps.is_spike(highest + 1e-6)


def test_noise_is_not_a_spike(tmp_path: Path) -> None:
    """For any level of the losses; a slow increase is not a spike either."""
    rng = random.Random(0)
    for middle in (-3.0, 0.0, 0.02, 5.0):
        steps = Steps(tmp_path, loss_spike_factor=1.2)
        for number in range(2000):
            loss = middle + number / 1000 + rng.gauss(0, 0.1)
            steps.check(loss)
            steps.good(loss)


def test_the_median_covers_the_latest_losses(tmp_path: Path) -> None:
    steps = Steps(tmp_path, loss_spike_factor=3)
    assert not steps.after([1.0] * 9).is_spike(1e9)
    assert steps.after([1.0]).is_spike(3.1)
    assert steps.after([10.0] * 9).is_spike(3.1)
    steps.after([1.0] * 90 + [10.0] * 51)
    assert len(steps.state_dict()["losses"]) == 100
    assert steps.is_spike(30.1) and not steps.is_spike(29.9), "51 of the last hundred losses"
    assert not Steps(tmp_path).after([1.0] * 50).is_spike(1e9), "not enabled"


def test_skipped_windows_are_counted(tmp_path: Path) -> None:
    steps = Steps(tmp_path, on_bad_step="skip", max_bad_steps=2)
    steps.skip(FAULT, plan(0, 1), 2)
    steps.skip(BadStep("the loss is nan", "non-finite loss"), plan(1, 0), 6)
    assert steps.count == 2 and len(steps.told) == 2
    assert steps.lines[1] == {
        "event": "bad_step", "step": 6, "window": [1, 0], "kind": "non-finite loss", "message": "the loss is nan",
        "action": "skip", "bad_steps": 2, "rows": [0, 1],
    }  # fmt: skip
    with pytest.raises(BadStep, match="max_bad_steps=2"):
        steps.skip(FAULT, plan(1, 1), 7)


def test_runs_no_longer_return_to_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="^rewind_windows=2: unknown option; runs no longer return to a checkpoint"):
        CPOConfig(output_dir=str(tmp_path), rewind_windows=2)  # type: ignore[call-arg]
