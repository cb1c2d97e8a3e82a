"""Runs that go on from a checkpoint end as if nothing had happened, to the bit, whatever they are made of.

Weights, logs, tables of completions, trainer state and the next checkpoint are those of the run that was never
interrupted. With ``-m ci`` a subset in which every pair of values meets; everything, with DeepSpeed's compiled Adam as
well, by ``make resume-matrix``.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import DRIVERS, selected_cases
from resume_comparison import differences
from resume_grid import (
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
    """Every run of the cells, and those that go on: one job for each number of ranks."""
    for world in (1, 2):
        runs = runs_of([case for case in cases if case["ranks"] == world], models)
        if runs:
            spec = folder / f"spec-{world}.json"
            spec.write_text(json.dumps(runs))
            ranks.run(DRIVERS / "resume_runs.py", spec, nproc=world, timeout=120 + 30 * len(runs))


def check(case: Combination, folder: Path) -> None:
    """One cell: nothing differs, and the whole run took the course that it is there for."""
    point, runs = POINTS[case["point"]], folder / whole_of(case)
    assert differences(runs / "whole", runs / f"after-{point}", point) == []
    state = json.loads((runs / "whole" / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == (_STOPPED_AT if case["course"] == "stopped" else STEPS)
    assert state["num_input_tokens_seen"] > 0
    if case["course"] == "best":
        assert state["best_global_step"] == POINTS["epoch"], "there would be nothing to go back to"
    assert (runs / "whole" / "out" / "completions.jsonl").exists() == (case["method"] == "OnlineDPO")


@pytest.fixture(scope="module")
def trained(
    models: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    ranks: RankServer,
    request: pytest.FixtureRequest,
) -> Path:
    """The folder with the runs of the tests that were selected, and no others."""
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
        pytest.skip("nothing about a resume is new there")
    train(cases, models, tmp_path, ranks)
    for case in cases:
        check(case, tmp_path)
    shutil.rmtree(tmp_path)  # a gigabyte, of all tests that pass
