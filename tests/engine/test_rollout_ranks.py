"""Rollouts on two ranks: neither waits forever, and training is not affected."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from conftest import DRIVERS
from support.drivers.rollout import PROMPTS, SEQUENCES, STAGES_AND_WAYS
from support.oracle.dense import load, token_logps

from tools.ranks import RankServer

pytestmark = pytest.mark.ci

NAMES = [f"{stage} {way}" for stage, ways in STAGES_AND_WAYS.items() for way in ways]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, base: str, ranks: RankServer) -> list[dict[str, Any]]:
    """The results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"model": base}))
    ranks.run(DRIVERS / "rollout.py", spec)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_stop_at_very_different_lengths(found: list[dict[str, Any]], name: str) -> None:
    first, second = (one[name] for one in found)
    # One rank ends every completion with its first token, the other never does.
    assert first["first stops"] == [[1, 1]] * 4 and second["first stops"] == [[8, 8]]
    assert first["second stops"] == [[8, 8]] * 4 and second["second stops"] == [[1, 1]]
    assert second["second has none"] == [] and first["first has none"] == []
    assert len(first["second has none"]) == len(PROMPTS) and second["first has none"] == [[8, 8]] * len(PROMPTS)
    assert first["whole"] == second["whole"] == []
    assert first["described"] == second["described"]
    assert ("layer by layer" in first["described"]) == name.endswith("by layer")
    assert first["described"].startswith("continuous" if name.endswith("continuous") else "generate")


def test_the_device_with_less_memory_decides_for_both(found: list[dict[str, Any]]) -> None:
    assert [one["fits"] for one in found] == [4, 4]


def test_a_token_loss_with_a_rank_without_tokens(found: list[dict[str, Any]], base: str) -> None:
    dense = load(base)
    logps = torch.cat([token_logps(dense, prompt, completion) for prompt, completion in SEQUENCES[0]])
    gradients = torch.autograd.grad(logps.exp().mean(), list(dense.parameters()))
    norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    for stage in STAGES_AND_WAYS:
        assert [one[f"{stage} tokens"] for one in found] == pytest.approx([norm] * 2, rel=1e-5), stage


def test_training_after_rollouts_is_what_it_would_have_been(found: list[dict[str, Any]]) -> None:
    """Although a rollout failed on one rank, and the ranks had different numbers of prompts."""
    assert [one["unaffected"] for one in found] == [True, True]
