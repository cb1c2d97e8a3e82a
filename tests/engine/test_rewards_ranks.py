"""A reward function or judge that fails on one rank of two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import DRIVERS

from tools.ranks import RankServer


@pytest.mark.ci
def test_every_rank_gets_the_same_error(ranks: RankServer, tmp_path: Path) -> None:
    done = ranks.run(DRIVERS / "failing_rewards.py", tmp_path / "out.json", timeout=60, check=False)
    assert (tmp_path / "out.json").exists(), done.stderr[-3000:]
    said = json.loads((tmp_path / "out.json").read_text())
    raised = "reward function 'length' raised KeyError: 'answer' (failing_rewards.py, line "
    for other, own in (said["one"], said["empty"]):
        assert own.startswith(raised) and "rank 1's row 0 to rank 1's row 1; " in own
        assert own.endswith(" (on rank 1) [KeyError]") and other == own.replace("[KeyError]", "[NoneType]")
    ((short, same), (odd, too)) = said["two"], said["judge"]
    assert short == same and "rank 0's row 0" in short and "(on rank 0; also failed: 1)" in short
    assert odd == too and "judge 'judge' returned 2" in odd and "row 1; " in odd and "(on rank 1)" in odd
    assert said["stopping"] == ["cut"] * 2
    assert said["good"] == ["[3.0, 3.0]", "[]"]
    # Finally the error is not caught: one line, regardless of the rank that prints it.
    assert done.returncode == 1
    spoken = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(spoken) == 1 and "'length' raised KeyError: 'answer'" in spoken[0] and "(on rank 1)" in spoken[0]
