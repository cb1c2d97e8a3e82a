"""Every piece of state in a checkpoint is needed: a run that goes on without it, or with an older one, differs.

Pieces are those that the files have (``resume_tampering.py``), so that new ones are looked at without being listed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import DRIVERS
from resume_grid import POINTS, make_models, runs_of

from tools.ranks import RankServer

# With a buffer that training changes, three moments of an own optimizer, and callbacks that count.
_CASE = {"method": "OnlineDPO", "stage": "stage2", "ranks": 1, "optimizer": "own", "dtype": "", "course": "stopped"}
_NEXT_STEP = "the next step sets it before anything reads it"
EXCUSED = {
    "run_state-00000.json: online.epoch": _NEXT_STEP,
    "run_state.json: trainer.epoch": _NEXT_STEP,
    "run_state.json: trainer.num_input_tokens_seen": _NEXT_STEP,
    "run_state.json: totals.last": _NEXT_STEP,
    "run_state.json: completions.rows": _NEXT_STEP,
    "run_state.json: totals.seconds": "a time; test_run_state.py",
    "run_state.json: boundary left out": "of a run that a callback ended right there; test_run_state.py",
    "run_state.json: rollout left out": "decided again, by the free memory of the same machine; test_run_state.py",
    "run_state.json: retries left out": "a count, and nothing was repeated in these runs; test_retries.py",
    "run_state.json: overflows left out": "a count, and nothing overflowed in these runs; test_fp16.py",
    "model.safetensors: all": "masters are in the fragments, where weights are not in fp32",
}

pytestmark = pytest.mark.ci


@pytest.mark.parametrize(
    ("dtype", "only", "least"), [("fp32", "", 45), ("fp16", "(model|optimizer|.*engine)", 8)], ids=["fp32", "fp16"]
)
def test_every_piece_of_state_is_needed(dtype: str, only: str, least: int, tmp_path: Path, ranks: RankServer) -> None:
    """In fp16 only of what is not there in fp32: masters and a loss scale."""
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
