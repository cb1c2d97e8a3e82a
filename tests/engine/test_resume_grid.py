"""Resumed runs are bitwise equal to uninterrupted runs, in all combinations of settings.

Weights, logs, tables of completions, trainer state and the next checkpoint are compared. ``-m ci`` runs a subset that
covers every pair of values; ``make resume-matrix`` runs all combinations, including DeepSpeed's compiled Adam.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import DRIVERS, selected_cases
from support.resume_comparison import differences
from support.resume_grid import (
    FACTORS,
    POINTS,
    STEPS,
    Combination,
    make_models,
    name_of,
    part,
    runs_of,
    sampled,
    whole_of,
)

from tools.ranks import RankServer

_SAMPLED = "test_a_resumed_run_is_bitwise_equal"
_STOPPED_AT = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("models"))


def train(cases: list[Combination], models: dict[str, str], folder: Path, ranks: RankServer) -> None:
    """Train all runs of the cells and resume them, in one job per number of ranks."""
    for world in (1, 2):
        runs = runs_of([case for case in cases if case["ranks"] == world], models)
        if runs:
            spec = folder / f"spec-{world}.json"
            spec.write_text(json.dumps(runs))
            ranks.run(DRIVERS / "resume_runs.py", spec, nproc=world, timeout=120 + 30 * len(runs))


def check(case: Combination, folder: Path) -> None:
    """Check one cell: nothing differs, and the uninterrupted run covers the intended case."""
    point, runs = POINTS[case["point"]], folder / whole_of(case)
    assert differences(runs / "whole", runs / f"after-{point}", point) == []
    state = json.loads((runs / "whole" / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == (_STOPPED_AT if case["course"] == "stopped" else STEPS)
    assert state["num_input_tokens_seen"] > 0
    if case["course"] == "best":
        assert state["best_global_step"] == POINTS["epoch"], "the best checkpoint must be an earlier one"
    assert (runs / "whole" / "out" / "completions.jsonl").exists() == (case["method"] == "OnlineDPO")


@pytest.fixture(scope="module")
def trained(
    models: dict[str, str], tmp_path_factory: pytest.TempPathFactory, ranks: RankServer, request: pytest.FixtureRequest
) -> Path:
    """Train the runs of the selected tests only; return their folder."""
    folder = tmp_path_factory.mktemp("sampled")
    train(selected_cases(request, _SAMPLED), models, folder, ranks)
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("case", sampled(), ids=name_of)
def test_a_resumed_run_is_bitwise_equal(case: Combination, trained: Path) -> None:
    check(case, trained)


@pytest.mark.slow
@pytest.mark.parametrize("ranked", FACTORS["ranks"])
@pytest.mark.parametrize("stage", FACTORS["stage"])
@pytest.mark.parametrize("method", FACTORS["method"])
def test_every_cell(
    models: dict[str, str], tmp_path: Path, ranks: RankServer, method: str, stage: str, ranked: int
) -> None:
    cases = part(method, stage, ranked)
    if not cases:
        pytest.skip("covered by other cells")
    train(cases, models, tmp_path, ranks)
    for case in cases:
        check(case, tmp_path)
    shutil.rmtree(tmp_path)  # all passing tests together would need a gigabyte
