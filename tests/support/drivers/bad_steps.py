"""Runs with failures in selected windows, and runs whose window plan omits those windows.

Usage: bad_steps.py SPEC, a JSON list of runs: ``name``, ``method``, ``model``, ``args``, ``train``; ``faults``, each a
``kind``, a ``window`` as epoch and index, and optionally a ``rank``; ``left_out``, windows
without rows; ``from``, the name of a run and the step of its checkpoint to resume from. Next to SPEC, ``NAME/out`` is
the run's output folder, ``NAME/final`` has the final weights, and ``NAME/outcome.json`` its history, or the error.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import alignment
from alignment.cli.guarded import guarded
from alignment.config.errors import AlignmentError
from alignment.data.windows import WindowCounts, WindowPlan, WindowSampler
from alignment.engines.collectives import on_first_rank
from alignment.run.ranks import rank, world_size
from alignment.training import bad_steps as faults
from alignment.training.trainer import AlignmentTrainer
from alignment.training.window import WindowPass

LEAST = 2  # losses before a spike can be detected
SPIKE = 60.0


class Spoiler:
    """Spoils windows of training.

    ``gradient``: a hook on one parameter makes its gradient nan. ``loss``: the loss is nan. ``spike``: the loss is
    multiplied by a large factor.

    Args:
        spoilt: the faults.
    """

    def __init__(self, spoilt: list[dict[str, Any]]) -> None:
        self.left = [{"rank": None, **fault} for fault in spoilt]

    def __call__(self, passed: WindowPass, plan: WindowPlan, *args: Any, train: bool, **kwargs: Any) -> Any:
        """Replace ``WindowPass.__call__``."""
        with contextlib.ExitStack() as spoilt:
            for fault in self.left:
                if train and fault["window"] == [plan.epoch, plan.step] and fault["rank"] in (None, rank()):
                    spoilt.enter_context(getattr(self, fault["kind"])(passed))
            return COMPUTED(passed, plan, *args, train=train, **kwargs)

    @contextlib.contextmanager
    def gradient(self, passed: WindowPass) -> Iterator[None]:
        model = passed.models.policy.scorer.model
        one = next(p for name, p in model.named_parameters() if p.requires_grad and "down_proj" in name)
        hook = one.register_hook(lambda gradient: gradient * math.nan)
        yield
        hook.remove()

    def loss(self, passed: WindowPass) -> Any:
        return _scaled(passed, math.nan)

    def spike(self, passed: WindowPass) -> Any:
        return _scaled(passed, SPIKE)


def _scaled(passed: WindowPass, factor: float) -> Any:
    losses = passed.method.losses

    def scaled(*args: Any) -> Any:
        result = losses(*args)
        return result._replace(local=result.local * factor)

    return mock.patch.object(passed.method, "losses", scaled)


COMPUTED: Callable[..., Any] = WindowPass.__call__
PLANNED = WindowSampler.plan


def leaving_out(windows: list[list[int]]) -> Callable[..., WindowPlan]:
    """Replace ``WindowSampler.plan``: these windows have no rows."""

    def plan(sampler: WindowSampler, epoch: int, step: int) -> WindowPlan:
        made = PLANNED(sampler, epoch, step)
        if [epoch, step] not in windows:
            return made
        return replace(made, micro_batches=(), longest=(), longest_mismatched=(), counts=WindowCounts(*(0,) * 5))

    return plan


@contextlib.contextmanager
def conditions(run: dict[str, Any]) -> Iterator[None]:
    """Within this context, windows fail or are omitted."""
    spoiler = Spoiler(run.get("faults", []))
    with (
        mock.patch.object(WindowPass, "__call__", lambda *args, **kwargs: spoiler(*args, **kwargs)),
        mock.patch.object(WindowSampler, "plan", leaving_out(run.get("left_out", []))),
        mock.patch.object(faults, "_LEAST", LEAST),
    ):
        yield


def vowels(completions: list[str]) -> list[float]:
    """Return different scores."""
    return [sum(letter in "aeiou" for letter in text) + len(text) / 100 for text in completions]


def made(run: dict[str, Any], folder: Path, **more: Any) -> AlignmentTrainer:
    """Return the trainer of a run."""
    if run["method"] == "OnlineDPO":
        more["reward_funcs"] = vowels
    args = getattr(alignment, f"{run['method']}Config")(output_dir=str(folder / "out"), **run["args"])
    return getattr(alignment, f"{run['method']}Trainer")(
        model=run["model"], args=args, train_dataset=run["train"], **more
    )


def train(run: dict[str, Any], folder: Path) -> None:
    """Train to the end or to an error, and save the results."""
    place = folder / run["name"]
    checkpoint = None
    if "from" in run:
        before, step = run["from"]
        checkpoint = f"checkpoint-{step}"
        on_first_rank(lambda: shutil.copytree(folder / before / "out", place / "out"))
    outcome: dict[str, Any] = {}
    # Random draws that depend on the process's history would affect the results.
    torch.manual_seed(sum(map(ord, run["name"])) + rank())
    with conditions(run), contextlib.closing(made(run, place)) as trainer:
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
            trainer.save_model(place / "final")
        except AlignmentError as error:
            outcome["error"] = str(error)
        outcome["history"] = trainer.state.log_history
        outcome["weights finite"] = _finite(trainer)
    everyone: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(everyone, (outcome.get("error"), json.dumps(outcome["history"])))
    assert len({error for error, _ in everyone}) == 1, "all ranks raise the same error, or none does"
    if rank() == 0:
        place.mkdir(parents=True, exist_ok=True)
        (place / "outcome.json").write_text(json.dumps(outcome))


def _finite(trainer: AlignmentTrainer) -> bool:
    parts: list[Tensor] = [p.detach() for p in trainer.engines.policy.scorer.parameters() if p.numel()]
    return all(bool(part.isfinite().all()) for part in parts)


def main() -> None:
    """Train all runs of the file."""
    mock.patch("alignment.training.run_page.draw_page").start()
    spec = Path(sys.argv[1])
    for run in json.loads(spec.read_text()):
        train(run, spec.parent)


if __name__ == "__main__":
    sys.exit(guarded(main))
