"""A reward function or judge that fails on one rank of two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import DRIVERS

from tools.ranks import RankServer

ADVICE = "fix the function, or return None for samples that it cannot score"


@pytest.mark.ci
def test_every_rank_gets_the_same_error(ranks: RankServer, tmp_path: Path) -> None:
    done = ranks.run(DRIVERS / "failing_rewards.py", tmp_path / "out.json", timeout=60, check=False)
    assert (tmp_path / "out.json").exists(), done.stderr[-3000:]
    said = json.loads((tmp_path / "out.json").read_text())
    raised = "reward function 'length' raised KeyError: 'answer' (failing_rewards.py, line "
    rows = "while scoring rank 1's row 0 to rank 1's row 1"
    for case in ("one", "empty"):
        other, own = said[case]
        assert own.startswith(raised) and own.endswith(f"{rows}; {ADVICE} (on rank 1) [KeyError]")
        assert other == own.replace("[KeyError]", "[NoneType]")
    short = (
        "reward function 'length' returned 1 scores for 2 samples, rank 0's row 0 to rank 0's row 1; expected one for "
        "each (on rank 0; also failed: 1) [NoneType]"
    )
    odd = (
        "judge 'judge' returned 2 (an integer) for row 1; expected 0 (the first is better), 1 (the second is "
        "better) or -1 (no verdict) (on rank 1) [NoneType]"
    )
    assert (said["two"], said["judge"]) == ([short] * 2, [odd] * 2)
    assert said["stopping"] == ["cut"] * 2
    assert said["good"] == ["[3.0, 3.0]", "[]"]
    # Finally the error is not caught: one line, regardless of the rank that prints it.
    assert done.returncode == 1
    spoken = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(spoken) == 1 and "'length' raised KeyError: 'answer'" in spoken[0] and "(on rank 1)" in spoken[0]
