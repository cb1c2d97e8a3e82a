"""The texts by which torch tells of a lost rank, as it really raises them: each of them has to be recognized."""

from __future__ import annotations

import pytest
from conftest import DRIVERS

from tools.ranks import RankServer

pytestmark = pytest.mark.faults
LINE = "lost=True defect=False another rank exited without reporting an error, or the network to it is down"
COLLECTIVES = ("all_reduce", "send", "broadcast", "gather_object")
ON_STORE = [f"{call}: DistNetworkError {LINE} (" for call in ("get", "add", "set", "check")]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("killed", [f"{call}: RuntimeError {LINE} (" for call in COLLECTIVES]),
        ("store_killed", [f"all_reduce: RuntimeError {LINE} (", *ON_STORE]),
        ("silent", [f"all_reduce: RuntimeError {LINE} (Timed out", f"wait: DistStoreError {LINE} (wait timeout"]),
    ],
)
def test_what_torch_raises_is_recognized(ranks: RankServer, case: str, expected: list[str]) -> None:
    done = ranks.run(DRIVERS / "lost_peers.py", case, timeout=60, check=False, env={"TORCH_CPP_LOG_LEVEL": "ERROR"})
    lines = done.stdout.splitlines()
    assert len(lines) == len(expected), done.stdout
    for line, start in zip(lines, expected):
        assert line.startswith(start)
