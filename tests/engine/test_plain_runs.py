"""Two windows of KTO, CPO and Online DPO on one rank in this process: all logged metrics against float64.

Updates, and all other ways to compute them, are compared in ``test_split_invariance.py`` and ``test_split_grid.py``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.drivers.runs import canned, one_run
from support.helpers import make_model
from support.split_oracle import online_steps, oracle_steps
from support.split_results import assert_same
from support.split_runs import run

from alignment.rollout.engine import RolloutEngine


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {"tied": make_model(folder / "tied", seed=1), "reference": make_model(folder / "reference", seed=2)}


@pytest.mark.parametrize("method", ["KTO", "CPO", "OnlineDPO"])
def test_logged_metrics_against_float64(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(RolloutEngine, "generate", canned)
    plain = run(method, method, models, "stage0", 8, 1, folder=str(tmp_path))
    one_run(plain, tmp_path)
    outcome = json.loads((tmp_path / f"{method}.json").read_text()) | {"run": plain}
    if method == "OnlineDPO":
        expected = online_steps(outcome)[1]
    else:
        steps = oracle_steps(outcome)
        expected = [{**step.metrics, "loss": step.loss, "grad_norm": step.grad_norm} for step in steps]
        for metrics in expected:
            del metrics["objective/entropy"]  # of methods that generate
    logs = [entry for entry in outcome["log"] if "grad_norm" in entry]
    for number, (found, wanted) in enumerate(zip(logs, expected, strict=True), start=1):
        assert {"rewards/chosen", "rewards/rejected", "entropy"} <= wanted.keys()
        assert_same(found, wanted, 1e-4, f"{method} step {number}", wanted)
