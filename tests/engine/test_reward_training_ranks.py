"""Rewards on two ranks: scores of unequal numbers of samples per rank, and errors of one rank.

The training of reward models on two ranks is compared with that on one in ``test_split_grid.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from support.data_tokenizers import char_tokenizer
from support.helpers import make_classifier
from transformers import AutoModelForSequenceClassification

from tools.ranks import RankServer

pytestmark = pytest.mark.ci

SAMPLES = [
    [["once ", "upon a time"], ["a", "b" * 30], ["", "cd"], ["long prompt, ", "short"], ["x", "y"]],
    [["z", "abc"]],
]
PLACEMENTS = ("replica", "offload")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_classifier(tmp_path_factory.mktemp("models") / "model", "untied", seed=1)


@pytest.fixture(scope="module")
def scores(model: str, tmp_path_factory: pytest.TempPathFactory, ranks: RankServer) -> list[dict[str, Any]]:
    """The scores and errors of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "spec.json").write_text(json.dumps({"reward_model": model, "samples": SAMPLES}))
    ranks.run(DRIVERS / "reward_ranks.py", folder / "spec.json")
    return [json.loads((folder / f"scores-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_score_unequal_numbers_of_samples(scores: list[dict[str, Any]], model: str, placement: str) -> None:
    classifier, tokenizer = AutoModelForSequenceClassification.from_pretrained(model), char_tokenizer()
    for rank, found in enumerate(scores):
        texts = [f"{prompt}{completion}</s>" for prompt, completion in SAMPLES[rank]]
        ids = [tokenizer(text, return_tensors="pt")["input_ids"] for text in texts]
        with torch.no_grad():
            expected = [float(classifier(input_ids=one).logits[0, 0]) for one in ids]
        assert found[placement] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert found[f"{placement} afterwards"] == found[placement]


def test_an_error_on_one_rank_is_raised_on_all(scores: list[dict[str, Any]]) -> None:
    for placement in PLACEMENTS:
        told = {found[f"{placement} error"] for found in scores}
        assert len(told) == 1
        assert told.pop().endswith("or the template (on rank 1)")


def test_every_rank_gets_the_same_error(ranks: RankServer, tmp_path: Path) -> None:
    """A reward function or judge fails on one rank of two."""
    done = ranks.run(DRIVERS / "failing_rewards.py", tmp_path / "out.json", timeout=60, check=False)
    assert (tmp_path / "out.json").exists(), done.stderr[-3000:]
    said = json.loads((tmp_path / "out.json").read_text())
    raised = "reward function 'length' raised KeyError: 'answer' (failing_rewards.py, line "
    for other, own in (said["one"], said["empty"]):
        assert own.startswith(raised) and "rank 1's row 0; rank 1's row 1; " in own
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
