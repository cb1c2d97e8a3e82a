"""Models, data and command lines of the killed runs: tiny models with all state that a restart could lose."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.ranks.client import ROOT

METHODS = ("kto", "online_dpo")
STEPS, SAVE_TOTAL_LIMIT = 12, 2
REWARDS = '''
def letters(completions):
    """A reward that depends on every letter."""
    return [sum(map(ord, text)) % 17 / 4 for text in completions]
'''


def test_helpers() -> ModuleType:
    """Import the tests' helpers for tiny models and rows."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support import helpers
    from transformers.utils import logging

    logging.disable_progress_bar()
    return helpers


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines, in a new folder if necessary."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class World:
    """The folder with the models, rows and reward functions of all runs."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> World:
        """Write all files, using the tests' helpers for tiny models."""
        helpers = test_helpers()
        make_model, unpaired_rows = helpers.make_model, helpers.unpaired_rows
        make_model(folder / "policy", seed=1, layers=1)
        config = json.loads((folder / "policy" / "config.json").read_text())
        (folder / "policy" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
        (folder / "rewards.py").write_text(REWARDS)
        write_rows(folder / "kto.jsonl", unpaired_rows(28, seed=3))
        write_rows(folder / "online_dpo.jsonl", ({"prompt": row["prompt"]} for row in unpaired_rows(28, seed=5)))
        return cls(folder)

    def arguments(self, method: str, output_dir: Path, **changes: object) -> list[str]:
        """Return the arguments of ``launch/train.py``, the same for every attempt. ``changes`` override options."""
        options: dict[str, object] = {
            "model_name_or_path": self.folder / "policy",
            "dataset_name": self.folder / f"{method}.jsonl",
            "max_train_samples": 24,
            "dataset_test_split": "train",
            "max_eval_samples": 4,
            "output_dir": output_dir,
            "resume_from_checkpoint": "latest",
            "max_length": 48,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "learning_rate": 5e-3,
            "warmup_ratio": 0,
            "disable_dropout": False,
            "gradient_checkpointing": False,
            "max_steps": STEPS,
            "logging_steps": 1,
            "disable_tqdm": True,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_strategy": "steps",
            "save_steps": 2,
            "save_total_limit": SAVE_TOTAL_LIMIT,
            "load_best_model_at_end": True,
            "deepspeed": "zero2" if method == "kto" else "zero3",
        }
        if method == "online_dpo":
            options |= {"reward_funcs": f"{self.folder / 'rewards.py'}:letters", "max_new_tokens": 8}
            options |= {"num_completions_to_log": 2}
        else:
            options |= {"max_prompt_length": 16}
        options |= changes
        return [method, *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
