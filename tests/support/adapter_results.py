"""Compare runs of ``adapter_grid.py`` and others like them with PEFT's model in float64 (``oracle/adapters.py``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from support.adapter_grid import BITS, Combination, adapter_run, name_of, reference_of
from support.oracle.adapters import AdapterStep, Task, dense_base, steps_of
from support.oracle.dense import CPOOptions, DPOOptions, KTOOptions
from support.oracle.pairs import pairs_of
from support.split_oracle import answered
from support.split_results import Results, assert_same, distance, norm
from support.split_runs import METHOD
from tools.ranks import RankServer

DRIVER = Path(__file__).parent / "drivers" / "adapter_runs.py"
# Tolerance of losses, gradient norms and updates: two runs this close to float64 are about as close to each other.
CLOSE = 1e-5
OPTIONS = {"KTO": KTOOptions, "CPO": CPOOptions, "DPO": DPOOptions, "OnlineDPO": DPOOptions}


class Oracle:
    """The steps of runs in float64, computed once for runs that differ only in their engine."""

    def __init__(self) -> None:
        self.bases: dict[Any, Any] = {}
        self.steps: dict[str, list[AdapterStep]] = {}

    def __call__(self, outcome: dict[str, Any]) -> list[AdapterStep]:
        run, case = outcome["run"], outcome["run"]["case"]
        name = name_of(reference_of(case))
        if name not in self.steps:
            self.steps[name] = self._steps(outcome, run, case)
        return self.steps[name]

    def _steps(self, outcome: dict[str, Any], run: dict[str, Any], case: Combination) -> list[AdapterStep]:
        task = task_of(run)
        key = (run["model"], BITS.get(case["kind"]))
        if key not in self.bases:
            self.bases[key] = dense_base(key[0], task.classifies, key[1])
        windows = outcome["windows"]
        if case["method"] == "OnlineDPO":
            windows = [pairs_of(answered(window, 2))[0] for window in windows]
        start = run["args"].get("adapter_name_or_path") or outcome["folder"] / "step-0"
        return steps_of(
            self.bases[key], start, windows, task, run["args"]["learning_rate"], new=case["start"] == "new"
        )


def task_of(run: dict[str, Any]) -> Task:
    """The task of a run."""
    method = run["trainer"]
    if method not in OPTIONS:
        return Task(method, center=run["args"].get("center_rewards_coefficient", 0.0))
    fields = OPTIONS[method].__dataclass_fields__
    return Task(method, OPTIONS[method](**{n: v for n, v in METHOD[method].items() if n in fields}))


def outcomes(
    cases: list[Combination], bases: dict[str, str], starts: Path, folder: Path, ranks: RankServer
) -> Results:
    """The results of the cases by name: one job for each number of ranks."""
    found: Results = {}
    for world in (1, 2):
        place = folder / str(world)
        place.mkdir()
        runs = [adapter_run(case, bases, place, starts) for case in cases if case["ranks"] == world]
        if runs:
            (place / "spec.json").write_text(json.dumps(runs))
            ranks.run(DRIVER, place / "spec.json", nproc=world, timeout=60 + 10 * len(runs))
            found |= {run["name"]: outcome_of(run, place) for run in runs}
    return found


def outcome_of(run: dict[str, Any], place: Path) -> dict[str, Any]:
    """The driver's output, with ``logs`` and ``updates`` of each step, ``tensors`` before each and ``run``."""
    outcome, folder = json.loads((place / f"{run['name']}.json").read_text()), place / run["name"]
    logs = [entry for entry in outcome["log"] if "grad_norm" in entry]
    tensors = [load_file(folder / f"step-{step}" / "adapter_model.safetensors") for step in range(len(logs) + 1)]
    updates = [
        {name: value.double() - before[name].double() for name, value in after.items()}
        for before, after in zip(tensors, tensors[1:])
    ]
    return {**outcome, "logs": logs, "updates": updates, "tensors": tensors, "run": run, "folder": folder}


def check(outcome: dict[str, Any], steps: list[AdapterStep], close: float = CLOSE) -> None:
    """Check all steps of a run: the log, the changes up to a relative error of ``close``, and what did not change."""
    case = outcome["run"]["case"]
    assert [len(rows) for rows in outcome["windows"]] == [4, 4, 3]
    for number, (expected, log, update) in enumerate(zip(steps, outcome["logs"], outcome["updates"], strict=True)):
        what = f"step {number + 1}"
        # Before new adapters have changed, all rewards are 0 up to rounding, and none is the higher one.
        undecided = {"rewards/accuracies"} if case["start"] == "new" and number == 0 else set()
        assert_same(log, expected.metrics, 1e-4, what, expected.metrics.keys() - undecided)
        assert_same(log, expected.metrics, CLOSE, what, ("loss", "grad_norm"))
        assert distance(update, expected.update) <= close, what
        assert norm(update) / norm(outcome["tensors"][number]) >= 5e-3, "too small a step could hide a wrong one"
    assert steps[-1].metrics.get("kl", 1) > 0.01, "a clamped one would not depend on the reference's mismatched pairs"
    check_moved(outcome, case)


def check_moved(outcome: dict[str, Any], case: Combination) -> None:
    """Trained weights have changed, including A of new adapters once B is not 0; nothing else has, bitwise."""
    before, after = outcome["before"], outcome["after"]
    assert before["frozen"] and before["frozen"] == after["frozen"]
    assert before["trained"].keys() == after["trained"].keys()
    still = {name for name, value in before["trained"].items() if value == after["trained"][name]}
    assert not still
    tensors = outcome["tensors"]
    assert len(tensors[0]) == len(before["trained"])
    if case["start"] == "continued":
        given = load_file(Path(outcome["run"]["args"]["adapter_name_or_path"]) / "adapter_model.safetensors")
        assert given.keys() == tensors[0].keys()
        assert all(bool((tensors[0][name] == value).all()) for name, value in given.items())
    else:
        assert not any(value.any() for name, value in tensors[0].items() if "lora_B" in name)
