"""Scripts that call ``train()`` without a command are protected as well: two ranks, without a launcher."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import DRIVERS
from support.helpers import make_model

from tools.ranks import RankServer

PLACE = r"in phase \w+, step 2"


@pytest.mark.parametrize(
    ("fault", "codes", "says", "stacks"),
    [
        pytest.param("stop", [1, -9], rf"rank 1 .*{PLACE}: .* the process is suspended", [0], marks=pytest.mark.ci),
        ("kill", [1, -9], rf"rank 1 .*{PLACE} was killed", []),
        pytest.param("sleep", [1, 1], rf"no progress for .*rank 1 .*{PLACE}", [0, 1], marks=pytest.mark.ci),
        pytest.param("lock", [1, 1], rf"rank 1 .*{PLACE}: .* interpreter lock", [0], marks=pytest.mark.ci),
        pytest.param(
            "error", [1, 0], r"rank 1 in phase training, step 2: ZeroDivisionError", [], marks=pytest.mark.ci
        ),
        pytest.param(
            "exit", [1, 0], r"rank 1 in phase training, step 2: exited with status 0", [], marks=pytest.mark.ci
        ),
        pytest.param("term", [85, 85], "", [], marks=pytest.mark.ci),
    ],
)
def test_a_rank_of_a_script_fails(
    fault: str, codes: list[int], says: str, stacks: list[int], tmp_path: Path, ranks: RankServer
) -> None:
    model = make_model(tmp_path / "model", layers=1)
    done = ranks.run(DRIVERS / "plain_script.py", fault, tmp_path, model, timeout=60, grace=30, check=False)
    assert [one.code for one in done.ranks] == codes, done.report()
    assert re.search(says, done.stderr), done.report()
    assert [number for number in (0, 1) if (tmp_path / "out" / f"hang-{number}.txt").exists()] == stacks
    assert done.stdout.count("stopped") == (2 if fault == "term" else 0), "every rank can catch it"
    if fault == "lock":  # its dead-man switch has ended it
        assert any("on_step_begin" in path.read_text() for path in tmp_path.glob("alignment-hang-1-*"))


def test_a_script_without_a_fault_succeeds(tmp_path: Path, ranks: RankServer) -> None:
    model = make_model(tmp_path / "model", layers=1)
    done = ranks.run(DRIVERS / "plain_script.py", "none", tmp_path, model, timeout=60)
    assert "error" not in done.stderr and not list(tmp_path.glob("alignment-hang-*"))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("fault", "caught"), [("data", ["KeyError", "OtherRankFailed"]), ("model", ["OtherRankFailed", "ModelError"])]
)
def test_an_error_of_one_rank_is_raised_on_all_ranks(
    fault: str, caught: list[str], tmp_path: Path, ranks: RankServer
) -> None:
    """Otherwise they would wait for hours, if the script catches it."""
    model = make_model(tmp_path / "model", layers=1)
    done = ranks.run(DRIVERS / "plain_script.py", fault, tmp_path, model, timeout=60)
    assert [one.stdout.splitlines()[-1] for one in done.ranks] == [f"caught {error}" for error in caught]
