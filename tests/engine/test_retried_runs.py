"""Runs whose reads and reward calls fail at first have the results of runs without failures."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS, run_launched
from support.helpers import make_model, options, paired_rows, train_and_close
from support.resume_comparison import timeless

from alignment import CPOConfig, CPOTrainer
from alignment.config.errors import DataError
from alignment.data.mixture import Part
from tools.ranks import RankServer

pytestmark = pytest.mark.usefixtures("own_process_group")


def log_of(folder: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (folder / "log.jsonl").read_text().splitlines()))


class Unread:
    """Rows whose first reads fail."""

    def __init__(self, times: int, error: Exception) -> None:
        self.times, self.error = times, error

    def __call__(self) -> list[dict[str, Any]]:
        if self.times:
            self.times -= 1
            raise DataError("rows.jsonl: cannot be read") from self.error
        return paired_rows(4, 3)


def trainer(folder: Path, rows: Unread, **more: Any) -> CPOTrainer:
    model = make_model(folder / "model", layers=1)
    args = CPOConfig(**options(folder, max_steps=1, retry_pause=0, **more))
    return CPOTrainer(model, args=args, train_dataset=Part("train_dataset", rows))


def test_reads_are_retried_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = trainer(tmp_path, Unread(2, OSError(errno.EIO, "Input/output error")))
    assert "train_dataset: DataError: rows.jsonl: cannot be read; retry 2 of 3 in 0 s" in capsys.readouterr().out
    train_and_close(made)
    lines = log_of(tmp_path / "out")
    assert [line["retries"] for line in lines if "retries" in line] == [2, 2]  # for the only step, and for the run
    assert "- Retries: 2\n" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("times", "limit", "error"), [(3, 2, TimeoutError()), (1, 0, TimeoutError()), (1, 3, ValueError("torn"))]
)
def test_reads_fail_after_the_last_retry(times: int, limit: int, error: Exception, tmp_path: Path) -> None:
    rows = Unread(times, error)
    with pytest.raises(DataError, match=r"rows\.jsonl: cannot be read"):
        trainer(tmp_path, rows, retries=limit)
    assert rows.times == max(0, times - limit - 1) if isinstance(error, TimeoutError) else rows.times == 0


@pytest.mark.ci
def test_two_ranks_count_the_same(tmp_path: Path, ranks: RankServer) -> None:
    ranks.run(DRIVERS / "retried.py", tmp_path, make_model(tmp_path / "model"), timeout=120)
    plain, own, other = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain-0", "retried-0", "retried-1")
    )
    assert [line.pop("retries") for line in own] == [line.pop("retries") for line in other] == [2, 3, 5, 5]
    assert timeless(own) == timeless(plain)
    weights = [(tmp_path / name / "checkpoint-3" / "model.safetensors").read_bytes() for name in ("plain", "retried")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        pytest.param("error", "[Errno 5] Input/output error", marks=pytest.mark.slow),
        pytest.param("killed", "DataLoader worker", marks=pytest.mark.ci),
    ],
)
def test_a_script_with_a_failing_worker_ends(how: str, says: str, tmp_path: Path) -> None:
    """Workers ignore SIGTERM, so without the shutdown Python's exit would wait forever; the limit is generous."""
    arguments = (make_model(tmp_path / "model"), tmp_path / "out", how)
    done = run_launched(DRIVERS / "failing_loader.py", *arguments, launcher="python")
    assert done.returncode == 1
    assert says in done.stderr.strip().splitlines()[-1]
