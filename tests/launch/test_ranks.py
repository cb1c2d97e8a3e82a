"""The server that forks the ranks of tests: the environment of a rank, and that ranks never hang or stay behind."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import DRIVERS

from tools.ranks import RankServer

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
