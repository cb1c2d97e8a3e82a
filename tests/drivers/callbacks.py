"""Two ranks with callbacks: one that only rank 1 acts on, and the return to the best weights under ZeRO-3."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from helpers import STAGES, paired_rows
from transformers import AutoModelForCausalLM, TrainerCallback

from alignment import CPOConfig, CPOTrainer
from alignment.engines.collectives import gathered
from alignment.engines.guard import guarded
from alignment.engines.launch_env import rank


class StopsOnRankOne(TrainerCallback):
    """Asks for the end after step 2, on rank 1 only."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2 and rank() == 1


class GetsWorse(TrainerCallback):
    """Makes the first evaluation the best one."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any) -> None:
        metrics["eval_loss"] = float(state.global_step)


def main() -> None:
    """Run it, and write the outcome beside the file that was given."""
    given = json.loads(Path(sys.argv[1]).read_text())
    args = CPOConfig(
        output_dir=given["out"],
        per_device_train_batch_size=1,
        num_train_epochs=3,
        learning_rate=1e-3,
        max_length=64,
        max_prompt_length=None,
        logging_steps=1,
        save_strategy="no",
        eval_strategy="steps",
        load_best_model_at_end=True,
        disable_tqdm=True,
        deepspeed=STAGES["stage3"],
    )
    trainer = CPOTrainer(
        model=given["model"],
        args=args,
        train_dataset=paired_rows(10),
        eval_dataset=paired_rows(3),
        callbacks=[StopsOnRankOne, GetsWorse],
    )
    output = trainer.train()
    folder = Path(given["out"])
    trainer.save_model(folder / "saved")
    stopped = gathered(output.global_step)
    trainer.close()
    if rank() == 0:
        saved, best = (
            AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("saved", "checkpoint-1")
        )
        outcome = {
            "stopped_at": stopped,
            "best_step": trainer.state.best_global_step,
            "same_weights": all(torch.equal(saved[name], best[name]) for name in best),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        }
        Path(sys.argv[1]).with_name("out.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    sys.exit(guarded(main))
