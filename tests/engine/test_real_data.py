"""Real preference data and a small trained model, if available: training works, and ranks and stages agree.

The folder ``ALIGNMENT_TEST_ASSETS`` contains ``models/stories260k``, ``data/kto_en.jsonl`` and
``data/preference_en.jsonl``; without it these tests are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from alignment import CPOConfig, CPOTrainer, KTOConfig, KTOTrainer
from alignment.data.windows import evaluation_plan
from alignment.training.trainer import AlignmentTrainer

ASSETS = Path(os.environ.get("ALIGNMENT_TEST_ASSETS", "ALIGNMENT_TEST_ASSETS is unset"))
MODEL = ASSETS / "models" / "stories260k"
FILES = {"kto": ASSETS / "data" / "kto_en.jsonl", "cpo": ASSETS / "data" / "preference_en.jsonl"}

pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason=f"no real data: {MODEL} does not exist")


def rows(method: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILES[method].read_text().splitlines()]


def learning_options(folder: Path, seed: int) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "max_length": 256,
        "max_prompt_length": 128,
        "max_completion_length": 128,
        "per_device_train_batch_size": 8,
        "learning_rate": 3e-4,
        "num_train_epochs": 15,
        "logging_steps": 4,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": seed,
        "deepspeed": "zero0",
    }


def row_rewards(trainer: AlignmentTrainer, beta: float) -> list[tuple[bool, float]]:
    """Return (label, reward) of every training row under the trained policy."""
    assert trainer.data.train is not None
    data = trainer.data.train
    plan = evaluation_plan(data.table, world_size=1, batch_size=8, seed=0, draw_partners=False)
    found = []
    models = trainer.engines.window_pass.models
    for micro in range(len(plan.micro_batches)):
        batch: Any = trainer.method.kind.collate(data.dataset, plan, micro, 0)
        with models.policy.inference():
            ratios = models.policy.forward(batch.matched).scores
        assert models.reference is not None
        ratios = ratios - models.reference.engine.forward(batch.matched).scores
        found += [(bool(label), beta * float(ratio)) for label, ratio in zip(batch.labels, ratios)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kto_learns(tmp_path: Path, seed: int) -> None:
    data = rows("kto")
    chosen = [row for row in data if row["label"]][:16]
    rejected = [row for row in data if not row["label"]][:16]
    args = KTOConfig(**learning_options(tmp_path, seed))
    trainer = KTOTrainer(model=str(MODEL), args=args, train_dataset=chosen + rejected)
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["rewards/margins"] >= 15
    rewards = row_rewards(trainer, args.beta)
    assert len(rewards) == 32 and sum(label for label, _ in rewards) == 16
    assert all((reward > 0) == label for label, reward in rewards), rewards
    trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_cpo_learns(tmp_path: Path, seed: int) -> None:
    args = CPOConfig(**learning_options(tmp_path, seed))
    trainer = CPOTrainer(model=str(MODEL), args=args, train_dataset=rows("cpo")[:32])
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "loss" in entry][-1]
    assert last["rewards/accuracies"] == 1.0
    trainer.close()


# Online DPO ---------------------------------------------------------------------------------------------------------

NAMES = ("Lily", "Tim", "Tom", "Sue", "Ben", "Mia", "Max", "Anna", "Jack", "Lucy")
OPENINGS = (
    "Once upon a time, there was a little girl named {}.",
    "One day, {} went to the park.",
    "{} had a big red ball.",
    "{} and mom were in the kitchen.",
    "Once there was a boy named {} who liked to play.",
    "{} saw a small dog in the garden.",
)
TALK = """
def talk(completions):
    \"\"\"Stories in which people speak: their quotation marks, up to six.\"\"\"
    return [float(min(text.count('"'), 6)) for text in completions]
"""


def story_run(folder: Path, launch: Callable[..., Any], world: int, stage: str) -> list[dict[str, float]]:
    """Run 60 steps on openings of stories with the command; return the logged steps."""
    folder.mkdir()
    prompts = [{"prompt": opening.format(name)} for opening, name in itertools.product(OPENINGS, NAMES)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "rewards.py").write_text(TALK)
    done = launch(
        ROOT / "launch" / "train.py",
        *(ROOT / "launch" / "recipes" / "online_dpo.yaml", "--dataset_name", folder / "prompts.jsonl"),
        *(
            "--model_name_or_path",
            MODEL,
            "--output_dir",
            folder / "out",
            "--reward_funcs",
            f"{folder}/rewards.py:talk",
        ),
        *("--deepspeed", stage, "--ref_placement", "offload", "--max_length", 128, "--max_new_tokens", 64),
        *("--per_device_train_batch_size", 8 // world, "--gradient_accumulation_steps", 2, "--learning_rate", "1e-4"),
        *("--max_steps", 60, "--logging_steps", 1, "--save_strategy", "no", "--disable_tqdm"),
        nproc=world,
        launcher={1: "python", 2: "deepspeed"}[world],
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "pairs/dropped" in line]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.parametrize("world", [1, 2])
def test_online_dpo_learns(tmp_path: Path, launch: Callable[..., Any], world: int, stage: str) -> None:
    """The mean score rises by at least half its initial standard deviation, and runs are reproducible."""
    steps = story_run(tmp_path / "first", launch, world, stage)
    scores = [step["objective/scores"] for step in steps]
    assert len(scores) == 60
    gain = statistics.mean(scores[-10:]) - statistics.mean(scores[:10])
    assert gain >= 0.5 * statistics.stdev(scores[:10]), scores
    assert story_run(tmp_path / "second", launch, world, stage) == steps
