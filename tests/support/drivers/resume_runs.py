"""Train uninterrupted runs, and resume each from some of its checkpoints; for ``test_resume_grid.py``.

Usage: resume_runs.py SPEC, a JSON list returned by ``resume_grid.runs_of``. Next to SPEC, ``NAME/whole`` and
``NAME/after-STEP`` contain the output folder ``out``, the final weights ``final`` and ``history.json``. An
uninterrupted run that is there already is not trained again.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from support.drivers.callbacks import GetsWorse
from support.resume_grid import POINTS, STEPS
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    set_seed,
)

import alignment
from alignment.cli.guarded import guarded
from alignment.engines.collectives import on_first_rank
from alignment.engines.launch_env import init_distributed
from alignment.run.ranks import rank

TORN = '{"step": 99, "of a truncated line'


def counting(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    """A hook: a module's output depends on its number of calls in training, which a buffer counts."""
    if module.training:
        module.asked.add_(1)
    return output * (1 + 0.001 * module.asked)


class Saves(TrainerCallback):
    """Requests a checkpoint at each step that a run is resumed from, and at the next one."""

    def __init__(self, points: list[int]) -> None:
        self.steps = {step for point in points for step in (point, point + 1)}

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step in self.steps:
            control.should_save = True


def live_model(run: dict[str, Any]) -> PreTrainedModel:
    """Return a model with a buffer that training changes."""
    kind = AutoModelForSequenceClassification if run["method"] == "Reward" else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_pretrained(run["model"], dtype=torch.float32)
    last = model.get_submodule("model.norm")
    last.register_buffer("asked", torch.zeros(()), persistent=False)
    last.register_forward_hook(counting)
    return model


def made(run: dict[str, Any], folder: Path) -> Any:
    """Return the trainer of a run."""
    model: Any = run["model"]
    optimizers: tuple[Any, Any] = (None, None)
    if run["own"]:
        model = live_model(run)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 1e-3},
        ]
        optimizer = torch.optim.AdamW(groups, lr=5e-3, amsgrad=True)
        optimizers = optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    args = getattr(alignment, f"{run['method']}Config")(output_dir=str(folder / "out"), **run["args"])
    return getattr(alignment, f"{run['method']}Trainer")(
        model=model,
        args=args,
        train_dataset=run["train"],
        eval_dataset=run["eval"],
        optimizers=optimizers,
        callbacks=[GetsWorse, EarlyStoppingCallback(run["patience"]), Saves(run["points"])],
    )


def train(run: dict[str, Any], folder: Path, checkpoint: str | None = None) -> None:
    """Train to the end, and save the results."""
    trainer = made(run, folder)
    with contextlib.closing(trainer):
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(folder / "final")
        if rank() == 0:
            (folder / "history.json").write_text(json.dumps(trainer.state.log_history))


def left_behind(whole: Path, folder: Path, newest: int | None = None) -> None:
    """Copy a run's output folder with checkpoints up to a step or all; its logs are complete, plus a torn line."""
    later = set() if newest is None else {f"checkpoint-{step}" for step in range(newest + 1, STEPS + 1)}
    shutil.copytree(whole / "out", folder / "out", ignore=lambda place, names: later & set(names))
    for name in ("log.jsonl", "completions.jsonl"):
        if (folder / "out" / name).exists():
            with (folder / "out" / name).open("a") as file:
                file.write(TORN)


def disturb(seed: int) -> None:
    """Draw from the process's random generators."""
    set_seed(seed)
    for _ in range(seed % 7):
        random.random(), np.random.rand(), torch.rand(1)


def main() -> None:
    """Train all runs of the file."""
    mock.patch("alignment.training.run_page.draw_page").start()
    # The CPU accelerator reports fp16 as unsupported only because it is slower than bf16.
    mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True).start()
    init_distributed(use_cpu=True)  # a run that is only resumed copies files first
    spec = Path(sys.argv[1])
    for run in json.loads(spec.read_text()):
        whole = spec.parent / run["name"] / "whole"
        if not whole.exists():
            train(run, whole)
        for point in run["points"]:
            folder = spec.parent / run["name"] / f"after-{point}"
            # The newest existing checkpoint, or an older one by name.
            asked, newest = ("latest", point) if point == POINTS["epoch"] else (f"checkpoint-{point}", None)
            on_first_rank(lambda: left_behind(whole, folder, newest))  # noqa: B023 - called immediately
            disturb(1000 + 10 * point + rank())
            train(run, folder, asked)


if __name__ == "__main__":
    sys.exit(guarded(main))
