"""Requirements for writing a checkpoint together: one shared folder, and a barrier at which the host waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import DRIVERS

from tools.ranks import RankServer

pytestmark = pytest.mark.ci


def test_two_ranks_and_their_folder(ranks: RankServer, tmp_path: Path) -> None:
    done = ranks.run(DRIVERS / "shared_folder.py", tmp_path, timeout=60)
    found = [json.loads(rank.stdout.splitlines()[-1]) for rank in done.ranks]
    assert found[0]["waited"][0] > 0.3 and found[1]["waited"][1] > 0.3, "who came first waited for the other"
    for number, one in enumerate(found):
        assert (one["shared"], one["late"]) == ("", ""), "a folder visible to all ranks"
        assert one["node-local"].startswith(f"output_dir: {tmp_path}/{number} on n2 is node-local"), "on both"
        for broken in (0, 1):
            assert f"/0 on n{broken + 1} cannot be written: Read-only file system" in one[f"read-only on {broken}"]
        assert one["left"] == ["0", "0/.lock", "1", "1/.lock", "late"], "nothing else is left behind"
