"""When a run logs, evaluates and saves, compared with transformers' Trainer for the same options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.helpers import options, paired_rows, train_and_close
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from alignment import CPOConfig, CPOTrainer

VALUES = [5.0, 2.0, 4.0, 1.0, 3.0, 0.5, 6.0, 7.0, 8.0]
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
SHARED = {
    "per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 1e-6,
    "logging_steps": 1, "eval_steps": 3, "save_steps": 5, "save_strategy": "no",
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "shares": {
        **EVALUATED, "logging_steps": 0.3, "eval_steps": 0.25, "save_strategy": "steps", "save_steps": 0.45,
        "warmup_steps": 0.15, "num_train_epochs": 1.5,
    },
    "epochs": {
        "logging_strategy": "epoch", "eval_strategy": "epoch", "save_strategy": "epoch", "save_steps": 500,
        "max_steps": 8,
    },
    "no log": {**EVALUATED, "eval_delay": 5, "logging_strategy": "no", "logging_first_step": True},
    "the best": {**EVALUATED, "eval_steps": 1, "save_strategy": "best", "logging_steps": 4, "num_train_epochs": 1.5},
    "late, in epochs": {"eval_strategy": "epoch", "eval_delay": 1.5, "save_strategy": "best"},
}  # fmt: skip


class Recorder(TrainerCallback):
    """Records events with their steps; the values of the metric are given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.lengths: tuple[Any, ...] = ()
        self.rates: list[float] = []
        self._values = iter(VALUES)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "learning_rate" in logs:
            self.events.append(("log", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        metrics["eval_loss"] = next(self._values)
        self.events.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        intervals = state.logging_steps, state.eval_steps, state.save_steps
        self.lengths = (state.max_steps, state.num_train_epochs, *intervals, state.epoch)


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"loss": (self.weight * x).mean()}


def theirs(folder: Path, more: dict[str, Any]) -> Recorder:
    recorder, rows = Recorder(), [{"x": [float(row)], "labels": [0.0]} for row in range(11)]
    if more["save_strategy"] == "best":
        more = {"metric_for_best_model": "loss", **more}
    args = TrainingArguments(str(folder), use_cpu=True, disable_tqdm=True, report_to="none", **more)
    Trainer(Line(), args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[recorder]).train()
    return recorder


@pytest.mark.ci
def test_intervals_match_transformers(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {}
    with monkeypatch.context() as alone:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            alone.delenv(name, raising=False)
        for name, more in CASES.items():
            expected[name] = theirs(tmp_path / "theirs" / name, SHARED | more)
    for name, more in CASES.items():
        recorder = Recorder()
        sizes = {"gradient_accumulation_steps": 1, "lr_scheduler_type": "linear"}
        args = CPOConfig(**options(tmp_path / name, **{**sizes, **SHARED, **more}))
        rows = {"train_dataset": paired_rows(11), "eval_dataset": paired_rows(2)}
        train_and_close(CPOTrainer(model=model, args=args, callbacks=[recorder], **rows))
        end = recorder.lengths[0]
        # The last step is logged even if the number of steps is not a multiple of the interval.
        own = [event for event in recorder.events if event != ("log", end)]
        assert own == [event for event in expected[name].events if event != ("log", end)], name
        assert (("log", end) in recorder.events) == (more.get("logging_strategy") != "no"), name
        assert recorder.lengths == expected[name].lengths, name
        assert recorder.rates == expected[name].rates, name
