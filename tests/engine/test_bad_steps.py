"""Runs with bad steps are bitwise equal to runs that omit those windows from the start, also after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS, selected_cases
from support.bad_step_runs import (
    CASES,
    FAULTS,
    LEFT_OUT,
    RESUMED,
    STEPS,
    Case,
    differences,
    events,
    name_of,
    outcome,
    run_of,
    runs_of,
    state_of,
)
from support.drivers.bad_steps import train
from support.resume_grid import make_models

from tools.ranks import RankServer

_GRID = "test_the_window_is_omitted_bitwise"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_models(tmp_path_factory.mktemp("models"))["model"]


@pytest.fixture(scope="module")
def trained(
    model: str, tmp_path_factory: pytest.TempPathFactory, ranks: RankServer, request: pytest.FixtureRequest
) -> Path:
    """Train the runs of the selected tests, in one job per number of ranks; return their folder."""
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
def test_the_window_is_omitted_bitwise(case: Case, trained: Path) -> None:
    whole = trained / name_of(case)
    assert "error" not in outcome(whole)
    bad = events(whole, "bad_step")
    kinds = ["non-finite gradient", "non-finite loss", "loss spike"]
    assert [(e["kind"], e["window"], e["bad_steps"]) for e in bad] == [
        (kind, window, number) for number, (kind, (_, window)) in enumerate(zip(kinds, FAULTS, strict=True), 1)
    ]
    assert {e["action"] for e in bad} == {"skip"} and events(whole, "omitted_window") == []
    state = state_of(whole)["bad_steps"]
    assert (state["count"], len(state["losses"])) == (3, STEPS - 3)
    assert differences(whole, trained / f"{name_of(case)}-without") == []
    again = trained / f"{name_of(case)}-again"
    assert differences(whole, again, RESUMED + 1) == []
    assert [e["window"] for e in events(again, "bad_step")] == LEFT_OUT


@pytest.fixture
def in_process(own_process_group: None, model: str, tmp_path: Path) -> Callable[..., Path]:
    """Train one run of ``PLAIN`` in this process; return its folder."""

    def trained(
        name: str, *, spoilt: Sequence[dict[str, Any]] = (), left_out: Any = (), go_on: Any = None, **more: Any
    ) -> Path:
        run = {**run_of(PLAIN, model, **more), "name": name, "faults": list(spoilt), "left_out": list(left_out)}
        train({**run, "from": go_on} if go_on else run, tmp_path)
        return tmp_path / name

    return trained


PLAIN: Case = ("stage0", "fp32", 1, "CPO", "full")
LATE = {"kind": "gradient", "window": [1, 1]}


def test_a_stop_saves_the_last_good_step_and_a_resume_can_skip(in_process: Callable[..., Path]) -> None:
    """The saved weights are those of the step before, also for a non-finite gradient; then the window is omitted."""
    stopped = in_process("stopped", spoilt=[LATE])
    found = outcome(stopped)
    assert found["weights finite"]
    assert found["error"].startswith("step 6: the gradient norm is ") and "\n" not in found["error"]
    assert found["error"].endswith(". The weights of step 5 are saved in checkpoint-5")
    again = in_process("again", spoilt=[LATE], go_on=("stopped", 5), on_bad_step="skip")
    assert differences(in_process("skipped", spoilt=[LATE], on_bad_step="skip"), again, 6) == []
    (event,) = events(again, "bad_step")
    assert (event["step"], event["window"], event["action"]) == (6, [1, 1], "skip")
    assert len(event["rows"]) == 4 and set(event["rows"]) <= set(range(1, 17))
    assert events(again, "end") and outcome(again)["history"][-1]["bad_steps"] == 1
    assert "- Bad steps: 1\n" in (again / "out" / "report.md").read_text()


@pytest.mark.ci
def test_a_run_with_too_many_bad_steps_ends(in_process: Callable[..., Path]) -> None:
    spoilt = [{"kind": "loss", "window": [0, 2]}, LATE, {"kind": "gradient", "window": [1, 2]}]
    ended = in_process("ended", spoilt=spoilt, on_bad_step="skip", max_bad_steps=2)
    error = outcome(ended)["error"]
    assert error.startswith("step 7: the gradient norm is nan") and "\n" not in error
    assert "2 bad steps occurred before (max_bad_steps=2). The weights of step 6 are saved in checkpoint-6" in error
    assert outcome(ended)["weights finite"] and len(events(ended, "bad_step")) == 2
    # The count covers the whole run, so the resumed run allows no more bad steps.
    again = in_process("again", spoilt=spoilt, go_on=("ended", 6), on_bad_step="skip", max_bad_steps=2)
    assert "2 bad steps occurred before" in outcome(again)["error"]
    more = in_process("more", spoilt=spoilt, go_on=("ended", 6), on_bad_step="skip", max_bad_steps=3)
    assert differences(more, in_process("whole", spoilt=spoilt, on_bad_step="skip"), 7) == []


def test_omitted_windows_of_an_earlier_release(in_process: Callable[..., Path]) -> None:
    """It could return to a checkpoint, and recorded next to its state which windows a resumed run must omit."""
    first = in_process("first")
    checkpoint = first / "out" / "checkpoint-4"
    state = json.loads((checkpoint / "run_state.json").read_text())
    amended = {"bad_steps": {**state["bad_steps"], "count": 1, "omitted": [[1, 1]]}, "log": state["log"]}
    (checkpoint / "run_state.amended.json").write_text(json.dumps(amended))
    again = in_process("again", go_on=("first", 4))
    assert [e["window"] for e in events(again, "omitted_window")] == [[1, 1]]
    assert differences(in_process("without", left_out=[[1, 1]]), again, 5) == []
    later = state_of(again, 6)["bad_steps"]
    assert (later["count"], later["omitted"]) == (1, [[1, 1]])
