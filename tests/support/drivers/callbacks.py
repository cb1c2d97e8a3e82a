"""Two ranks with callbacks: requests of one rank's callback in any event, and loading of the best weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support.helpers import STAGES, options, paired_rows
from transformers import AutoModelForCausalLM, TrainerCallback

from alignment import CPOConfig, CPOTrainer
from alignment.checkpoint.saving import gathered_state_dict
from alignment.cli.guarded import guarded
from alignment.engines.collectives import gathered
from alignment.run.ranks import rank

# Event, request and rank; always at step 2.
ASKED = [
    ("on_step_end", "should_training_stop", 1),
    ("on_log", "should_training_stop", 0),
    ("on_log", "should_save", 0),
    ("on_evaluate", "should_training_stop", 1),
    ("on_save", "should_training_stop", 0),
    ("on_epoch_begin", "should_epoch_stop", 1),
    ("on_step_end", "should_epoch_stop", 1),
]


class Asks(TrainerCallback):
    """Sets one flag in one event at step 2, on one rank."""

    def __init__(self, event: str, flag: str, on_rank: int) -> None:
        def ask(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= 2 and rank() == on_rank:
                setattr(control, flag, True)

        setattr(self, event, ask)


class GetsWorse(TrainerCallback):
    """Makes the first evaluation the best one."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        metrics["eval_loss"] = float(state.global_step)


def train(model: str, folder: Path, callbacks: list[Any], **more: Any) -> CPOTrainer:
    """Return a trained trainer; 5 windows per epoch."""
    size = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    args = CPOConfig(**{**options(folder, **size), "output_dir": str(folder), **more})
    rows = {"train_dataset": paired_rows(10), "eval_dataset": paired_rows(3)}
    trainer = CPOTrainer(model=model, args=args, callbacks=callbacks, **rows)
    # Set before training: an evaluation must not be reported by every rank.
    assert trainer.state.is_world_process_zero == (rank() == 0)
    trainer.train()
    return trainer


def one_that_asks(model: str, folder: Path, event: str, flag: str, on_rank: int) -> dict[str, Any]:
    """Return where all ranks stopped, and what they saved."""
    saves = {"save_strategy": "steps" if event == "on_save" else "no", "save_steps": 2}
    evaluates = {"eval_strategy": "steps" if event == "on_evaluate" else "no"}
    trainer = train(model, folder, [Asks(event, flag, on_rank)], max_steps=4, **saves, **evaluates)
    steps = gathered((trainer.state.global_step, trainer.state.epoch))
    trainer.close()
    return {"steps": steps, "saved": sorted(path.name for path in folder.glob("checkpoint-*"))}


def the_best(model: str, folder: Path, stage: str) -> dict[str, Any]:
    """Whether the weights of the best step were loaded on every rank."""
    evaluated = {"eval_strategy": "steps", "load_best_model_at_end": True, "save_strategy": "no"}
    trainer = train(model, folder, [GetsWorse], max_steps=3, deepspeed=STAGES[stage], **evaluated)
    trainer.save_model(folder / "saved")
    own = gathered_state_dict(trainer.model, keep=True)
    everyones = gathered({name: value.double().sum().item() for name, value in own.items()})
    trainer.close()
    if rank():
        return {}
    names = ("saved", "checkpoint-1")
    saved, best = (AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in names)
    same = all(torch.equal(saved[name], best[name]) for name in best)
    return {"step": trainer.state.best_global_step, "same_weights": same, "on_both": everyones[0] == everyones[1]}


def main() -> None:
    """Run all cases, and write the outcome next to the given file."""
    mock.patch("alignment.training.run_page.draw_page").start()
    spec = Path(sys.argv[1])
    given = json.loads(spec.read_text())
    out = Path(given["out"])
    outcome: dict[str, Any] = {"best": [the_best(given["model"], out / s, s) for s in ("stage2", "stage3")]}
    for event, flag, on_rank in ASKED:
        outcome[f"{event} {flag}"] = one_that_asks(given["model"], out / f"{event}-{flag}", event, flag, on_rank)
    if rank() == 0:
        spec.with_name("out.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    sys.exit(guarded(main))
