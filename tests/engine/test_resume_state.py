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
# What changes no number of the run, and is stored to be read, or to be decided anew for less memory.
EXCUSED: dict[str, str] = {}

pytestmark = pytest.mark.ci


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_no_piece_may_be_missing_or_stale(dtype: str, tmp_path: Path, ranks: RankServer) -> None:
    cases = [{**_CASE, "dtype": dtype, "point": point} for point in ("first", "inside")]
    runs = runs_of(cases, make_models(tmp_path / "models"))
    assert [run["points"] for run in runs] == [[POINTS["first"], POINTS["inside"]]]
    (tmp_path / "spec.json").write_text(json.dumps(runs))
    ranks.run(DRIVERS / "resume_tampered.py", tmp_path / "spec.json", nproc=1, timeout=500)
    found = json.loads((tmp_path / f"{runs[0]['name']}.json").read_text())
    assert found.pop("control") == []
    assert {piece for piece, differences in found.items() if not differences} <= EXCUSED.keys()
    assert len(found) > 40
