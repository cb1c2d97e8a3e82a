"""The texts by which torch tells of a lost rank, as it really raises them: each of them has to be recognized."""

from __future__ import annotations

import pytest
from conftest import DRIVERS

from tools.ranks import RankServer

pytestmark = pytest.mark.faults
LINE = "lost=True defect=False another rank exited without reporting an error, or the network to it is down"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("killed", [f"{call}: RuntimeError {LINE} (" for call in ("all_reduce", "gather_object")]),
        ("store_killed", [f"all_reduce: RuntimeError {LINE} (", f"add: DistNetworkError {LINE} ("]),
    ],
)
def test_what_torch_raises_is_recognized(ranks: RankServer, case: str, expected: list[str]) -> None:
    done = ranks.run(DRIVERS / "lost_peers.py", case, timeout=60, check=False, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected), done.stdout
    for line, start in zip(lines, expected):
        assert line.startswith(start)
