"""Every piece of state in a checkpoint is needed: a run resumed without it, or with an older one, differs.

The pieces are found in the files (``resume_tampering.py``), so new ones are tested without being listed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import DRIVERS
from resume_grid import POINTS, make_models, runs_of

from tools.ranks import RankServer

# With a buffer that training changes, a user's optimizer with three moments, and callbacks with a state.
_CASE = {"method": "OnlineDPO", "stage": "stage2", "ranks": 1, "optimizer": "own", "dtype": "", "course": "stopped"}
_NEXT_STEP = "the next step sets it before it is read"
EXCUSED = {
    "run_state-00000.json: online.epoch": _NEXT_STEP,
    "run_state.json: trainer.epoch": _NEXT_STEP,
    "run_state.json: trainer.num_input_tokens_seen": _NEXT_STEP,
    "run_state.json: totals.last": _NEXT_STEP,
    "run_state.json: completions.rows": _NEXT_STEP,
    "run_state.json: totals.seconds": "a time; test_run_state.py",
    "run_state.json: boundary left out": "only for a run ended by a callback; test_run_state.py",
    "run_state.json: rollout left out": "determined again from the free memory; test_run_state.py",
    "run_state.json: retries left out": "a count, and nothing is retried in these runs; test_retries.py",
    "run_state.json: overflows left out": "a count, and nothing overflows in these runs; test_fp16.py",
    "model.safetensors: all": "the fragments have master weights unless weights are fp32",
}

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    ("dtype", "only", "least"), [("fp32", "", 45), ("fp16", "(model|optimizer|.*engine)", 8)], ids=["fp32", "fp16"]
)
def test_every_piece_of_state_is_needed(dtype: str, only: str, least: int, tmp_path: Path, ranks: RankServer) -> None:
    """For fp16, only what fp32 does not have: master weights and a loss scale."""
    cases = [{**_CASE, "dtype": dtype, "point": point} for point in ("first", "inside")]
    (run,) = runs_of(cases, make_models(tmp_path / "models"))
    assert run["points"] == [POINTS["first"], POINTS["inside"]]
    (tmp_path / "spec.json").write_text(json.dumps([run | {"only": only}]))
    ranks.run(DRIVERS / "resume_tampered.py", tmp_path / "spec.json", nproc=1, timeout=500)
    found = json.loads((tmp_path / f"{run['name']}.json").read_text())
    assert found.pop("control") == []
    unnoticed = {piece for piece, differences in found.items() if not differences}
    assert unnoticed == {piece for piece in found.keys() & EXCUSED.keys() if dtype == "fp16" or "model" not in piece}
    assert len(found) >= least
