"""Runs with bad steps end as runs do whose window plan leaves those windows out: to the bit, also after a restart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bad_step_runs import CASES, FAULTS, LEFT_OUT, Case, differences, events, name_of, outcome, runs_of
from conftest import DRIVERS, selected_cases
from resume_grid import make_models

from tools.ranks import RankServer

_GRID = "test_the_window_is_left_out_to_the_bit"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_models(tmp_path_factory.mktemp("models"))["model"]


@pytest.fixture(scope="module")
def trained(
    model: str, tmp_path_factory: pytest.TempPathFactory, ranks: RankServer, request: pytest.FixtureRequest
) -> Path:
    """The folder with the runs of the tests that were selected: one job for each number of ranks."""
    folder = tmp_path_factory.mktemp("bad-steps")
    cases = selected_cases(request, _GRID)
    for world in (1, 2):
        runs = [run for case in cases if case[2] == world for run in runs_of(case, model)]
        if runs:
            spec = folder / f"spec-{world}.json"
            spec.write_text(json.dumps(runs))
            ranks.run(DRIVERS / "bad_steps.py", spec, nproc=world, timeout=120 + 20 * len(runs))
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_the_window_is_left_out_to_the_bit(case: Case, trained: Path) -> None:
    action, whole = case[-1], trained / name_of(case)
    assert "error" not in outcome(whole)
    bad = events(whole, "bad_step")
    kinds = ["non-finite gradient", "non-finite loss", "loss spike"]
    assert [(e["kind"], e["window"], e["bad_steps"]) for e in bad] == [
        (kind, window, number) for number, (kind, (_, window)) in enumerate(zip(kinds, FAULTS, strict=True), 1)
    ]
    assert [e.get("checkpoint") for e in bad] == (
        ["checkpoint-2", "checkpoint-4", "checkpoint-6"] if action == "rewind" else [None] * 3
    )
    assert {e["action"] for e in bad} == {action}
    assert [e["window"] for e in events(whole, "omitted_window")] == (LEFT_OUT if action == "rewind" else [])
    assert differences(whole, trained / f"{name_of(case)}-without") == []
    for step in (4, 6):
        again = trained / f"{name_of(case)}-from-{step}"
        assert differences(whole, again, step + 1) == []
        assert [e["window"] for e in events(again, "bad_step")] == LEFT_OUT
