"""What the files of a run say about it, while it runs, after its end, and after it was killed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from support.run_folders import HOLDER, at, end, entry, locked, start, write_checkpoint, write_log, write_status

from alignment.cli.status import status_line, status_lines
from alignment.reporting.run_view import Log, read_run
from alignment.run.status_file import STATUS

RESUME = {"event": "resume", "attempt": 2, "step": 4, "checkpoint": "checkpoint-4", "world_size": 4, "time": at(1000)}


# The log ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "rates"),
    [
        ([entry(1, 2, 10), entry(3, 2, 30)], (None, None)),
        ([entry(1, 2, 10), entry(3, 4, 10)], (1.0, None)),
        ([entry(4, 8, 400), RESUME, entry(6, 1004, 600), entry(8, 1008, 800)], (0.5, 50.0)),
        ([*(entry(s, 10 * s, 100 * s) for s in range(1, 11)), *(entry(s, 90 + s, 100 * s) for s in range(11, 61))],
         (1.0, 100.0)),
        ([entry(1, 2, 10), entry(100, 4, 1000), *end({})], (2.0, 20.0)),
    ],
)  # fmt: skip
def test_rates_are_those_of_the_newest_50_entries(
    records: list[dict[str, Any]], rates: tuple[float | None, float | None], tmp_path: Path
) -> None:
    """Of the newest attempt or, after the end, of the whole run."""
    write_log(tmp_path, [start(), *records])
    log = Log(tmp_path / "log.jsonl")
    assert log.rates() == rates
    assert log.last["step"] == max(record["step"] for record in records if "loss" in record)


def test_lines_that_are_no_json_are_counted_and_passed_over(tmp_path: Path) -> None:
    nested = b'{"num_tokens": ' + b"[" * 9000 + b"]" * 9000 + b"}"
    write_log(tmp_path, [start(), entry(1, 1, 1)])
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(b'\xff\xfe torn\n\n[1, 2]\n{"num_tokens": }\n' + nested + b"\n")
        for damage in ({"step": "2"}, {"num_tokens": None}, {"time": "soon"}, {"time": 5}):
            file.write(json.dumps(entry(2, 2, 2) | damage).encode() + b"\n")
        file.write(b'{"loss": 3.0}\n{"st')
    found = read_run(tmp_path)
    assert found.problems == ["log.jsonl: 9 lines cannot be read"]
    assert (found.metrics, found.status.step) == ({"loss": 1.0}, 1), "the newest that can be read"


# States -------------------------------------------------------------------------------------------------------------


def test_a_running_run(tmp_path: Path) -> None:
    older, *sets = ({f"eval{name}_loss": 0.7, "step": step} for name, step in (("", 25), ("_a", 30), ("_b", 30)))
    resume = {**RESUME, "step": 20, "time": at(19)}
    entries = [entry(step, 2 * step, 50 * step) for step in range(21, 41)]
    write_log(tmp_path, [start(), resume, *entries[:5], older, *entries[5:10], *sets, *entries[10:]])
    write_status(tmp_path, state="running", phase="train", attempt=3, stalled=2, restarts=1, step=39)
    (tmp_path / ".checkpoint-10.partial").mkdir()
    with locked(tmp_path):
        found = read_run(tmp_path)
    assert (found.status.state, found.alive) == ("running", True)
    assert (found.status.step, found.status.total_steps, found.eta_seconds) == (40, 100, pytest.approx(120))
    assert (found.metrics, found.metrics_step) == ({"loss": 1 / 40}, 40)
    assert (found.evaluation, found.evaluation_step) == ({"eval_a_loss": 0.7, "eval_b_loss": 0.7}, 30)
    assert found.resumes == [{name: value for name, value in resume.items() if name != "event"}]
    assert f"  state       running: {HOLDER}, phase train" in status_lines(found)
    assert (
        "  attempt     3, 2 in a row without a newer checkpoint, requeued 1 time; resumed after step 20"
        in status_lines(found)
    )
    assert "40 of 100 (40%), about 2 min 00 s left; 0.5 steps/s, 25 tokens/s; step 40: loss 0.025" in status_line(
        found
    )


def test_a_run_whose_process_was_killed(tmp_path: Path) -> None:
    write_status(tmp_path, state="running", phase="save")
    write_log(tmp_path, [start(), entry(1, 1, 1), entry(40, 40, 40)])
    with locked(tmp_path):
        assert read_run(tmp_path).status.state == "running"
    found = read_run(tmp_path)
    assert (found.status.state, found.alive, found.eta_seconds, found.holder) == ("lost", False, None, "")
    lost = "no heartbeat since 2026-09-21 14:14:01 UTC: process 4711 on node7 is gone, phase save"
    assert status_line(found).startswith(lost)


def test_a_process_that_has_released_the_folder_and_is_about_to_end(tmp_path: Path) -> None:
    write_status(tmp_path, state="running", host=os.uname().nodename, pid=os.getpid())
    assert read_run(tmp_path).sentence.startswith("running: process")
    os.utime(tmp_path / STATUS, (time.time() - 61,) * 2)  # another process may have its number
    assert read_run(tmp_path).status.state == "lost"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"state": "preempted", "signal": "SIGUSR1"}, "preempted by SIGUSR1 after step 40"),
        ({"state": "stopped", "signal": "STOP"}, "stopped by STOP after step 40"),
        ({"state": "failed", "error": "the GPU is out of memory"}, "failed: the GPU is out of memory"),
        ({"state": "finished", "step": 100}, "finished"),
        ({"state": "finished", "ended_early": "why"}, "finished early after step 40 of 100: why"),
    ],
)
def test_ends(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    why = {name: values.pop(name) for name in ("ended_early",) if name in values}
    write_status(tmp_path, **values)
    write_log(tmp_path, [start(), entry(1, 1, 1), entry(40, 40, 40), {**end({})[-1], **why}])
    found = read_run(tmp_path)
    assert (found.status.state, found.eta_seconds) == (values["state"], None)
    assert status_line(found).split("; ")[0] == said


def test_phases_after_the_end(tmp_path: Path) -> None:
    """Not those of an attempt that has been resumed."""
    write_status(tmp_path, state="finished", step=100)
    last = end({"save": 10.0, "train": 30.0})
    write_log(tmp_path, [start(), entry(99, 40, 900), *last])
    (tmp_path / "report.md").touch()
    found = read_run(tmp_path)
    assert found.report == str(tmp_path / "report.md")
    shown = [line for line in "\n".join(status_lines(found)).splitlines() if "%)" in line and "step " not in line]
    assert shown == ["  phases      train: 30.0 s (75%)", "              save: 10.0 s (25%)"]
    write_log(tmp_path, [start(), entry(99, 40, 900), *last, RESUME])
    assert read_run(tmp_path).phases == {}


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: os.truncate(folder / "model.safetensors", 100), "model.safetensors: does not have 3000 bytes"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 9000), "cannot be read"),
    ],
)
def test_an_incomplete_checkpoint(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    for step in (5, 10, 100):
        write_checkpoint(tmp_path, step, resumable=step > 5)
    (tmp_path / "checkpoint-7").touch()
    damage(tmp_path / "checkpoint-10")
    found = read_run(tmp_path)
    assert [(one.step, one.complete, one.bytes) for one in found.checkpoints] == [
        (100, True, 3000), (10, False, 0), (5, True, 3000)
    ]  # fmt: skip
    assert says in str(found.checkpoints[1].problem)
    assert [one.condition for one in found.checkpoints[::2]] == ["complete", "complete, weights only"]


# Text and JSON ------------------------------------------------------------------------------------------------------


def test_every_key_is_documented_and_its_value_is_json(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    write_status(tmp_path, state="finished")
    values = read_run(tmp_path).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    documented = (ROOT / "docs" / "guides" / "watching.md").read_text()
    assert [key for key in (*values, *values["checkpoints"][0]) if f"`{key}`" not in documented] == []
