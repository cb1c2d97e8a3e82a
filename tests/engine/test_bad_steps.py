"""Runs with bad steps are bitwise equal to runs that omit those windows from the start, also after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bad_step_runs import (
    CASES,
    FAULTS,
    LEFT_OUT,
    MORE,
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
from conftest import DRIVERS, selected_cases
from drivers.bad_steps import COMPUTED, Spoiler, train
from fragment_runs import fp16_on_cpu
from helpers import STAGES
from resume_grid import make_models

from alignment.data.windows import WindowPlan
from alignment.training.window import WindowPass
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


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.ci if case in CASES else pytest.mark.slow) for case in (*CASES, *MORE)],
    ids=name_of,
)
def test_the_window_is_omitted_bitwise(case: Case, trained: Path) -> None:
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
    state = state_of(whole)["bad_steps"]
    assert (state["count"], state["omitted"], len(state["losses"])) == (3, LEFT_OUT, STEPS - 3)
    assert differences(whole, trained / f"{name_of(case)}-without") == []
    again = trained / f"{name_of(case)}-again"
    assert differences(whole, again, RESUMED + 1) == []
    assert [e["window"] for e in events(again, "bad_step")] == LEFT_OUT


# Ends of a run, and where it resumes --------------------------------------------------------------------------------


@pytest.fixture
def in_process(own_process_group: None, model: str, tmp_path: Path) -> Callable[..., Path]:
    """Train one run of ``PLAIN`` in this process; return its folder."""

    def trained(name: str, *, spoilt: Sequence[dict[str, Any]] = (), go_on: Any = None, **more: Any) -> Path:
        run = {**run_of(PLAIN, model, **more), "name": name, "faults": list(spoilt)}
        train({**run, "from": go_on} if go_on else run, tmp_path)
        return tmp_path / name

    return trained


PLAIN: Case = ("stage0", "fp32", 1, "CPO", "full", "")
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
    assert (
        "| bad steps" in (again / "out" / "report.md").read_text()
        or "bad steps: 1" in (again / "out" / "report.md").read_text()
    )


@pytest.mark.ci
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_run_with_too_many_bad_steps_ends(action: str, in_process: Callable[..., Path]) -> None:
    spoilt = [{"kind": "loss", "window": [0, 2]}, LATE, {"kind": "gradient", "window": [1, 2]}]
    ended = in_process("ended", spoilt=spoilt, on_bad_step=action, max_bad_steps=2)
    error = outcome(ended)["error"]
    assert error.startswith("step 7: the gradient norm is nan") and "\n" not in error
    assert "2 bad steps occurred before (max_bad_steps=2). The weights of step 6 are saved in checkpoint-6" in error
    assert outcome(ended)["weights finite"] and len(events(ended, "bad_step")) == 2
    # The count covers the whole run, so the resumed run allows no more bad steps.
    again = in_process("again", spoilt=spoilt, go_on=("ended", 6), on_bad_step=action, max_bad_steps=2)
    assert "2 bad steps occurred before" in outcome(again)["error"]
    more = in_process("more", spoilt=spoilt, go_on=("ended", 6), on_bad_step=action, max_bad_steps=3)
    assert differences(more, in_process("whole", spoilt=spoilt, on_bad_step=action), 7) == []


@pytest.mark.ci
def test_without_a_checkpoint_a_rewind_skips(in_process: Callable[..., Path]) -> None:
    early = {"kind": "gradient", "window": [0, 1]}
    rewound = in_process("rewound", spoilt=[early], on_bad_step="rewind")
    (event,) = events(rewound, "bad_step")
    assert event["action"] == "skip" and "checkpoint" not in event
    assert differences(rewound, in_process("skipped", spoilt=[early], on_bad_step="skip")) == []


@pytest.mark.ci
def test_a_rewind_can_omit_windows_before_the_bad_one(in_process: Callable[..., Path]) -> None:
    rewound = in_process("rewound", spoilt=[LATE], on_bad_step="rewind", rewind_windows=2)
    (event,) = events(rewound, "bad_step")
    assert event["checkpoint"] == "checkpoint-4" and event["omitted"] == [[1, 0], [1, 1]]
    assert [e["window"] for e in events(rewound, "omitted_window")] == [[1, 0], [1, 1]]
    both = [{"kind": "loss", "window": [1, 0]}, LATE]
    assert differences(rewound, in_process("skipped", spoilt=both, on_bad_step="skip")) == []


def test_a_rewind_recovers_from_corrupted_weights(
    in_process: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skipping windows does not repair a flipped bit in the weights. A damaged newest checkpoint is not used."""
    plain = in_process("plain", spoilt=[LATE], on_bad_step="skip")
    broken: list[int] = []

    def breaks(spoiler: Spoiler, passed: WindowPass, plan: WindowPlan, *args: Any, **kwargs: Any) -> Any:
        if (plan.epoch, plan.step) == (1, 1) and not broken:
            broken.append(1)
            next(passed.models.policy.scorer.parameters()).data[0] = float("nan")
            (newest,) = (tmp_path / "rewound" / "out" / "checkpoint-4").glob("optimizer-*")
            content = bytearray(newest.read_bytes())
            content[-3] ^= 4
            newest.write_bytes(content)
        return COMPUTED(passed, plan, *args, **kwargs)

    monkeypatch.setattr(Spoiler, "__call__", breaks)
    rewound = in_process("rewound", on_bad_step="rewind")
    (event,) = events(rewound, "bad_step")
    assert event["kind"] == "non-finite loss" and event["checkpoint"] == "checkpoint-2"
    assert differences(rewound, plain) == []
    assert state_of(rewound)["run"]["attempt"] == 1
    assert [path.name for path in (rewound / "out" / "previous-1").iterdir()] == ["checkpoint-4"]


def test_windows_omitted_by_a_rewind_survive_a_restart(
    in_process: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hardware fault happens once; a run killed before its next checkpoint still omits the window."""
    once = {**LATE, "times": 1}
    whole = in_process("whole", spoilt=[once], on_bad_step="rewind")
    calls: list[WindowPlan] = []

    def killed(spoiler: Spoiler, passed: WindowPass, plan: WindowPlan, *args: Any, **kwargs: Any) -> Any:
        calls.append(plan)
        if [(plan.epoch, plan.step) for plan in calls].count((1, 0)) == 2:
            raise KeyboardInterrupt
        return spoil(spoiler, passed, plan, *args, **kwargs)

    with monkeypatch.context() as patch:
        spoil = Spoiler.__call__
        patch.setattr(Spoiler, "__call__", killed)
        with pytest.raises(KeyboardInterrupt):
            in_process("killed", spoilt=[once], on_bad_step="rewind")
    again = in_process("again", go_on=("killed", 4), on_bad_step="rewind")
    assert differences(whole, again, 5) == []
    (event,) = events(again, "bad_step")
    assert (event["window"], event["checkpoint"]) == ([1, 1], "checkpoint-4")
    assert state_of(again)["bad_steps"]["omitted"] == [[1, 1]]


@pytest.mark.ci
def test_an_overflow_in_fp16_is_not_a_bad_step(in_process: Callable[..., Path]) -> None:
    stage = {**STAGES["stage2"], "fp16": {"initial_scale_power": 24, "loss_scale_window": 1000, "hysteresis": 1}}
    with fp16_on_cpu():
        run = in_process("run", on_bad_step="stop", fp16=True, deepspeed=stage, dtype=None)
    norms = [line["grad_norm"] for line in outcome(run)["history"] if "grad_norm" in line]
    assert "error" not in outcome(run) and events(run, "bad_step") == []
    assert all(norms) and events(run, "overflow"), "windows that overflowed were repeated"
