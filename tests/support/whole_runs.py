"""Short runs of every method whose result depends on all state that a restart could lose."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import EarlyStoppingCallback

import alignment
from alignment.training.trainer import AlignmentTrainer
from support.drivers.canned import LONGEST
from support.helpers import make_classifier, make_model, options, paired_rows, unpaired_rows

TIMES = ("runtime", "per_second")


def make_models(folder: Path) -> dict[str, str]:
    """Create models with dropout, so that a random stream that is resumed at the wrong position changes the loss."""
    return {
        "policy": make_model(folder / "policy", seed=1, dropout=0.3),
        "classifier": make_classifier(folder / "classifier", "untied", seed=1, dropout=0.3),
    }


def vowels(completions: list[str], **_: Any) -> list[float]:
    """A reward: the fraction of vowels."""
    return [sum(letter in "aeiou" for letter in text) / (1 + len(text)) for text in completions]


def judge(prompts: list[Any], pairs: list[list[Any]]) -> list[int]:
    """Prefer the longer completion."""
    return [int(len(first) < len(second)) for first, second in pairs]


def make(name: str, models: dict[str, str], folder: Path, *callbacks: Any, **more: Any) -> AlignmentTrainer:
    """Create a trainer whose run depends on all state that a restart could lose."""
    method, _, how = name.partition("-")
    given = options(
        folder,
        num_train_epochs=2,
        lr_scheduler_type="linear",
        learning_rate=5e-3,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that evaluations get worse and patience is exhausted
        disable_dropout=False,
        include_num_input_tokens_seen=True,
        **{"logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **more},
    )
    arguments: dict[str, Any] = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=50), *callbacks]}
    rows: Callable[..., list[dict[str, Any]]] = unpaired_rows if method in ("KTO", "SFT") else paired_rows
    if method == "OnlineDPO":
        del given["max_prompt_length"]
        given |= {"max_new_tokens": LONGEST, "beta": [0.4, 0.2], "log_completions": 2, "num_completions_to_log": 2}
        arguments |= {"judge": judge} if how else {"reward_funcs": vowels}
        rows = lambda count, seed: [{"prompt": row["prompt"]} for row in paired_rows(count, seed)]  # noqa: E731
    if method == "SFT":
        rows = lambda count, seed: [{**r, "label": None} for r in unpaired_rows(count, seed)]  # noqa: E731
    return getattr(alignment, f"{method}Trainer")(
        model=models["classifier" if method == "Reward" else "policy"],
        args=getattr(alignment, f"{method}Config")(**given),
        train_dataset=rows(12, 3),
        eval_dataset=rows(4, 4),
        **arguments,
    )


def logged(trainer: AlignmentTrainer) -> list[dict[str, Any]]:
    """Return the logged values of a run without times."""
    return [{n: v for n, v in e.items() if not n.endswith(TIMES)} for e in trainer.state.log_history]


def completions(trainer: AlignmentTrainer) -> list[dict[str, Any]]:
    """Return the table of completions of a run."""
    file = trainer.output_dir / "completions.jsonl"
    return list(map(json.loads, file.read_text().splitlines())) if file.exists() else []
