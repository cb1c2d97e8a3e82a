"""Adapters under every configuration: method, kind, ZeRO stage, offload, ranks, new adapters and continued ones.

Every run is compared at every step with PEFT's model in dense float64 (``oracle/adapters.py``). By default, a subset
in which every pair of values occurs is tested; ``-m slow`` tests all cases and also compares each run with the
simplest one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import selected_cases
from support.adapter_grid import FACTORS, Combination, make_bases, name_of, part, reference_of, sampled
from support.adapter_results import Oracle, check, outcomes
from support.split_results import Results, assert_logged, distance

from tools.ranks import RankServer

_SAMPLED = "test_every_step_matches_peft_in_float64"

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="module")
def found(
    bases: dict[str, str],
    starts: Path,
    tmp_path_factory: pytest.TempPathFactory,
    ranks: RankServer,
    request: pytest.FixtureRequest,
) -> Results:
    """Train the runs of the selected tests only."""
    return outcomes(selected_cases(request, _SAMPLED), bases, starts, tmp_path_factory.mktemp("sampled"), ranks)


@pytest.mark.parametrize("case", sampled(), ids=name_of)
def test_every_step_matches_peft_in_float64(case: Combination, found: Results, oracle: Oracle) -> None:
    outcome = found[name_of(case)]
    check(outcome, oracle(outcome))


def test_new_adapters_are_initialized_identically_in_every_engine(found: Results) -> None:
    """Random but seeded, identical for each number of ranks and each ZeRO stage."""
    first: dict[Any, dict[str, Any]] = {}
    compared = 0
    for outcome in found.values():
        case, tensors = outcome["run"]["case"], outcome["tensors"][0]
        if case["start"] == "continued":
            continue
        expected = first.setdefault((case["kind"], case["method"] == "Reward"), tensors)
        assert expected.keys() == tensors.keys()
        assert all(torch.equal(value, expected[name]) for name, value in tensors.items()), name_of(case)
        compared += expected is not tensors
    assert compared >= len(found) / 2 or len(found) < 36


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FACTORS["kind"], "qdora"])
@pytest.mark.parametrize("method", FACTORS["method"])
def test_every_combination(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, ranks: RankServer, method: str, kind: str
) -> None:
    """With two layers; each run is also compared with the plainest one of the same adapters."""
    bases, oracle, cases = make_bases(tmp_path / "bases", layers=2), Oracle(), part(method, kind)
    wanted = {name_of(case): case for case in [*map(reference_of, cases), *cases]}
    found = outcomes(list(wanted.values()), bases, tmp_path / "starts", tmp_path, ranks)
    for case in wanted.values():
        outcome, plainest = found[name_of(case)], found[name_of(reference_of(case))]
        check(outcome, oracle(outcome))
        for step in range(3):
            logs = [
                {n: v for n, v in one["logs"][step].items() if n != "rewards/accuracies"}
                for one in (outcome, plainest)
            ]
            assert_logged(*logs, 1e-5, f"{name_of(case)} step {step + 1}")
            assert distance(outcome["updates"][step], plainest["updates"][step]) <= 1e-5, name_of(case)
