"""``benchmarks/side_by_side.py --gpu`` without a GPU: plan, options, failures, table, and runs on the CPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_sides, side_by_side, sides, worker
from benchmarks.gpu_sides import Machine, compare_on_gpu
from benchmarks.jobs import LORA, METHODS, PLAIN, Setting
from benchmarks.shapes import TINY, write_model

CPU = Machine(False, "bf16", 0, "a CPU")
QLORA = Setting(lora=True, in_4bit=True)
SHORT = ["--gpu", "--tiny", "--repeats", "1", "--steps", "2", "--warm_up", "1", "--threads", "1"]


def options_of(*arguments: str) -> Any:
    return side_by_side._parse([*SHORT, *arguments])


# Options and plan ---------------------------------------------------------------------------------------------------


# Runs that fail -----------------------------------------------------------------------------------------------------


# Tokens and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("cpo", PLAIN),
        pytest.param("kto", QLORA, marks=pytest.mark.ci),
        pytest.param("online_dpo", LORA, marks=pytest.mark.ci),
    ],
)
def test_our_side_of_a_row_runs(
    method: str, setting: Setting, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The worker's GPU code path with the CPU as the device."""
    done: list[Any] = []
    monkeypatch.setattr(worker, "cap_memory", done.append)
    monkeypatch.setattr(worker, "grow_segments", lambda: done.append("segments"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("peak"))
    write_model(tmp_path / "model", TINY)
    job = gpu_sides._job(tmp_path, method, TINY, options_of(), replace(CPU, gpu=True, limit=7))
    job = replace(job, output=str(tmp_path / "output"), rows=str(tmp_path / "rows.jsonl"), **asdict(setting))
    sides.write_rows(Path(job.rows), METHODS[method].rows(TINY, job.steps * job.rows_of_a_step, 0))
    found = worker.measure(replace(job, output=str(tmp_path / "other")))
    assert done == ["segments", 7, "peak"]
    assert len(found.wall) == 2 and found.allocated > 0 and found.first["loss"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["full", "lora", "qlora"])
@pytest.mark.parametrize("method", list(METHODS))
def test_both_sides_of_every_row_agree(method: str, settings: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl", reason='TRL is not installed: pip install ".[bench]"')
    options = options_of("--method", method, "--settings", settings)
    assert compare_on_gpu(options, replace(CPU, precision="fp32")) == 0
    assert "failed" not in capsys.readouterr().out
