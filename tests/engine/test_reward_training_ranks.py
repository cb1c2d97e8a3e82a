"""Reward models on two ranks: the same update as on one, and scores of unequal numbers of samples per rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from safetensors.torch import load_file
from support.data_tokenizers import char_tokenizer
from support.helpers import STAGES, make_classifier, options, paired_rows
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from alignment import RewardConfig, RewardTrainer
from tools.ranks import RankServer

pytestmark = pytest.mark.ci

ROWS = [row | {"margin": 0.25 * (n % 4)} for n, row in enumerate(paired_rows(15, seed=5))]
SAMPLES = [
    [["once ", "upon a time"], ["a", "b" * 30], ["", "cd"], ["long prompt, ", "short"], ["x", "y"]],
    [["z", "abc"]],
]
PLACEMENTS = ("replica", "offload")


def settings(folder: Path, stage: str, micro: int, steps: int) -> dict[str, Any]:
    """Two windows, of 8 and of 7 pairs, with plain SGD."""
    return options(
        folder,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=steps,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        center_rewards_coefficient=0.05,
        save_strategy="steps",
        save_steps=1,
        deepspeed=STAGES[stage],
    )


def updates(folder: Path, start: str) -> list[dict[str, Tensor]]:
    """Return the updates of the two steps."""
    before, found = load_file(Path(start) / "model.safetensors"), []
    for step in (1, 2):
        after = load_file(folder / "out" / f"checkpoint-{step}" / "model.safetensors")
        found.append({name: after[name].double() - before[name].double() for name in after})
        before = after
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, ranks: RankServer) -> dict[str, Any]:
    """Run one job on two ranks, and the run on one rank that it is compared with."""
    folder = tmp_path_factory.mktemp("ranks")
    model = make_classifier(folder / "model", "untied", seed=1)
    runs = [
        {
            "name": stage,
            "trainer": "Reward",
            "model": model,
            "args": settings(folder / stage, stage, micro, 4 // micro),
            "train": ROWS,
            "eval": ROWS[:5],
        }
        for stage, micro in (("stage0", 2), ("stage2", 1), ("stage3-offload", 4))
    ]
    spec = {"runs": runs, "reward_model": model, "samples": SAMPLES}
    (folder / "spec.json").write_text(json.dumps(spec))
    ranks.run(DRIVERS / "reward_ranks.py", folder / "spec.json")
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(**settings(folder / "one", "stage0", 8, 1)),
        train_dataset=ROWS,
        eval_dataset=ROWS[:5],
    )
    trainer.train()
    found: dict[str, Any] = {"model": model, "evaluation": trainer.evaluate(), "log": trainer.state.log_history}
    trainer.close()
    for run in runs:
        found[run["name"]] = json.loads((folder / f"{run['name']}.json").read_text())
        found[run["name"]]["updates"] = updates(folder / run["name"], model)
    found["updates"] = updates(folder / "one", model)
    found["scores"] = [json.loads((folder / f"scores-{rank}.json").read_text()) for rank in range(2)]
    return found


@pytest.mark.parametrize("stage", ["stage0", "stage2", "stage3-offload"])
def test_the_same_windows_give_the_same_update_on_two_ranks(results: dict[str, Any], stage: str) -> None:
    found = results[stage]
    for step in (0, 1):
        for name, value in results["log"][step].items():
            assert found["log"][step][name] == pytest.approx(value, rel=1e-4, abs=1e-5), f"step {step + 1} {name}"
        for name, expected in results["updates"][step].items():
            torch.testing.assert_close(found["updates"][step][name], expected, rtol=1e-3, atol=2e-6, msg=name)
        assert float(results["updates"][step]["score.weight"].norm()) > 0.01
    for name, value in results["evaluation"].items():
        if not name.endswith(("runtime", "per_second")):
            assert found["evaluation"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_score_unequal_numbers_of_samples(results: dict[str, Any], placement: str) -> None:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(results["model"]), char_tokenizer()
    for rank, found in enumerate(results["scores"]):
        texts = [f"{prompt}{completion}</s>" for prompt, completion in SAMPLES[rank]]
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        with torch.no_grad():
            expected = [float(model(input_ids=one).logits[0, 0]) for one in ids]
        assert found[placement] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert found[f"{placement} afterwards"] == found[placement]


def test_an_error_on_one_rank_is_raised_on_all(results: dict[str, Any]) -> None:
    for placement in PLACEMENTS:
        told = {found[f"{placement} error"] for found in results["scores"]}
        assert len(told) == 1
        assert told.pop().endswith("or the template (on rank 1)")


def test_every_rank_gets_the_same_error(ranks: RankServer, tmp_path: Path) -> None:
    """A reward function or judge fails on one rank of two."""
    done = ranks.run(DRIVERS / "failing_rewards.py", tmp_path / "out.json", timeout=60, check=False)
    assert (tmp_path / "out.json").exists(), done.stderr[-3000:]
    said = json.loads((tmp_path / "out.json").read_text())
    raised = "reward function 'length' raised KeyError: 'answer' (failing_rewards.py, line "
    for other, own in (said["one"], said["empty"]):
        assert own.startswith(raised) and "rank 1's row 0 to rank 1's row 1; " in own
        assert own.endswith(" (on rank 1) [KeyError]") and other == own.replace("[KeyError]", "[NoneType]")
    ((short, same), (odd, too)) = said["two"], said["judge"]
    assert short == same and "rank 0's row 0" in short and "(on rank 0; also failed: 1)" in short
    assert odd == too and "judge 'judge' returned 2" in odd and "row 1; " in odd and "(on rank 1)" in odd
    assert said["stopping"] == ["cut"] * 2
    assert said["good"] == ["[3.0, 3.0]", "[]"]
    # Finally the error is not caught: one line, regardless of the rank that prints it.
    assert done.returncode == 1
    spoken = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(spoken) == 1 and "'length' raised KeyError: 'answer'" in spoken[0] and "(on rank 1)" in spoken[0]
