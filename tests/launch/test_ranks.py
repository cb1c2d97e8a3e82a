"""The server that forks the ranks of tests: the environment of a rank, and that ranks never hang or stay behind."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from conftest import DRIVERS

from tools.ranks import RankServer, RanksFailed

ODD = DRIVERS / "odd_ranks.py"


def test_each_rank_is_a_separate_process(ranks: RankServer, tmp_path: Path) -> None:
    done = ranks.run(ODD, "facts", "more", cwd=tmp_path, env={"OWN": "value"})
    for rank, one in enumerate(done.ranks):
        seen = json.loads(one.stdout)
        assert seen["variables"].pop("MASTER_PORT").isdecimal()
        assert seen["variables"] == {
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "OWN": "value"},
        }
        assert seen["arguments"] == ["facts", "more"] and seen["folder"] == str(tmp_path) and one.stderr == ""
        assert seen["imported"] == {"torch": True, "deepspeed": True, "alignment": False, "helpers": False}


@pytest.mark.faults
def test_a_rank_that_dies_is_reported_and_nothing_stays_behind(ranks: RankServer, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks.run(ODD, "fails", env={"PIDS": str(tmp_path)}, timeout=30, grace=1)
    report = str(failed.value)
    assert report.startswith("rank 1 exited with status 1 after ") and "ValueError: a defect" in report
    assert "rank 0 was still running 1 s after rank 1 had failed and was killed" in report
    assert len(list(tmp_path.iterdir())) == 2
    assert not any(psutil.pid_exists(int(file.name)) for file in tmp_path.iterdir())
