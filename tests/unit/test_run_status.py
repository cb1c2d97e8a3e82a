"""What the files of a run say about it, while it runs, after its end, and after it was killed."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from run_folders import (
    BEGAN,
    at,
    end,
    entry,
    holding,
    start,
    write_checkpoint,
    write_log,
    write_status,
)

from alignment.cli.status_text import status_line, status_lines
from alignment.config.errors import OutputError
from alignment.engines.inspecting import life
from alignment.engines.inspecting import run as inspecting
from alignment.engines.inspecting.life import SILENT_S, Pulse
from alignment.engines.inspecting.run import RunReader
from alignment.engines.inspecting.view import RunView
from alignment.reporting.log_reading import LogReader, Rates
from alignment.reporting.run_lock import LOCK
from alignment.reporting.status_file import STATUS, now


class Clock:
    """A clock that is set manually."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The observer's."""
    clock = Clock()
    monkeypatch.setattr(inspecting, "Pulse", lambda folder: Pulse(folder, clock=clock))
    return clock


def view(folder: Path) -> RunView:
    return RunReader(folder).read()


def text(folder: Path) -> str:
    return "\n".join(status_lines(view(folder)))


# The log ------------------------------------------------------------------------------------------------------------


def test_rates_are_those_of_the_newest_entries(tmp_path: Path) -> None:
    """60 entries, the first ten of which took ten times as long; the last one came soon after that before it."""
    slow = [entry(step, 10 * step, 100 * step) for step in range(1, 11)]
    usual = [entry(step, 90 + step + (step == 59) / 2, 100 * step) for step in range(11, 61)]
    write_log(tmp_path, [start(), *slow, *usual])
    log = LogReader(tmp_path / "log.jsonl")
    log.read()
    assert log.rates() == Rates(pytest.approx(1.0), pytest.approx(100.0))
    assert log.last["step"] == 60


def test_a_single_entry_is_compared_with_the_start(tmp_path: Path) -> None:
    write_log(tmp_path, [start(), entry(4, 8, 400)])
    assert (view(tmp_path).steps_per_second, view(tmp_path).tokens_per_second) == (0.5, 50.0)
    resume = {"event": "resume", "run": "r", "attempt": 2, "step": 4, "checkpoint": "checkpoint-4", "time": at(1000)}
    write_log(tmp_path, [start(), entry(4, 8, 400), resume])
    found = view(tmp_path)
    assert (found.steps_per_second, found.metrics["loss"]) == (None, 0.25), "an entry of the attempt before is no rate"
    write_log(tmp_path, [start(), entry(4, 8, 400), resume, entry(6, 1004, 600)])
    found = view(tmp_path)
    assert (found.steps_per_second, found.tokens_per_second) == (0.5, None)
    assert found.resumes == [
        {"time": at(1000), "attempt": 2, "step": 4, "checkpoint": "checkpoint-4", "world_size": None}
    ]


def test_a_clock_that_was_set_back_gives_no_rate(tmp_path: Path) -> None:
    write_log(tmp_path, [start(), entry(1, 10, 10), entry(2, 5, 20)])
    assert view(tmp_path).steps_per_second is None


def test_a_log_is_read_on(tmp_path: Path) -> None:
    """Line by line, with a torn one; then cut back to a checkpoint and written again, and at last removed."""
    log, path = LogReader(tmp_path / "log.jsonl"), tmp_path / "log.jsonl"
    log.read()
    assert (log.size, log.last) == (0, {})
    lines = [json.dumps(record) + "\n" for record in (start(), *(entry(step, step, step) for step in range(1, 9)))]
    written = ""
    for number, line in enumerate(lines):
        path.write_text(written + line[: len(line) // 2])
        log.read()
        assert log.last.get("step") == (number - 1 if number > 1 else None)
        written += line
        path.write_text(written)
        log.read()
        assert log.last.get("step") == (number or None)
    resume = {"event": "resume", "step": 3, "attempt": 2, "time": at(20)}
    again = [
        json.dumps(record) + "\n" for record in (resume, *(entry(step, 20 + step, step) for step in range(4, 12)))
    ]
    path.write_text("".join(lines[:4] + again))
    assert path.stat().st_size > len(written), "longer than before: nothing but its content tells"
    log.read()
    assert (log.last["step"], [event["event"] for event in log.events]) == (11, ["start", "resume"])
    path.unlink()
    log.read()
    assert (log.last, log.events) == ({}, [])


def test_lines_that_are_no_json_are_counted_and_passed_over(tmp_path: Path) -> None:
    write_log(tmp_path, [start(), entry(1, 1, 1)])
    with (tmp_path / "log.jsonl").open("ab") as file:
        file.write(
            b'\xff\xfe torn\n\n[1, 2]\n{"num_tokens": }\n{"num_tokens": ' + b"[" * 9000 + b"]" * 9000 + b'}\n{"st'
        )
    found = view(tmp_path)
    assert found.problems == ["log.jsonl: 2 lines cannot be read"]
    assert (found.metrics, found.step) == ({"loss": 1.0}, 1), "the newest that can be read"


def test_a_log_from_before_times_were_logged_has_no_rates(tmp_path: Path) -> None:
    records = [start(), entry(1, 1, 1), entry(2, 2, 2)]
    for record in records:
        del record["time"]
    write_log(tmp_path, records)
    found = view(tmp_path)
    assert (found.step, found.total_steps, found.steps_per_second) == (2, 100, None)


# States -------------------------------------------------------------------------------------------------------------


def test_a_running_run(tmp_path: Path) -> None:
    with holding(tmp_path, job="77") as process:
        values = {"phase": "train", "attempt": 3, "stalled": 2, "restarts": 1, "time": now()}
        write_status(tmp_path, state="running", pid=process.pid, **values)
        older, *sets = [
            {"eval_loss": 0.9, "step": 25},
            {"eval_a_loss": 0.7, "step": 30},
            {"eval_b_loss": 0.8, "step": 30},
        ]
        resume = {"event": "resume", "attempt": 2, "step": 20, "time": at(19)}
        entries = [entry(step, 2 * step, 50 * step) for step in range(21, 41)]
        write_log(tmp_path, [start(), resume, *entries[:5], older, *entries[5:10], *sets, *entries[10:]])
        found = view(tmp_path)
        assert (found.state, found.alive, found.over) == ("running", True, False)
        assert (found.step, found.total_steps, found.eta_seconds) == (40, 100, pytest.approx(120))
        assert (found.metrics, found.metrics_step) == ({"loss": 1 / 40}, 40)
        assert (found.evaluation, found.evaluation_step) == ({"eval_a_loss": 0.7, "eval_b_loss": 0.8}, 30)
        said = text(tmp_path).splitlines()
    assert said == [
        f"kto: {tmp_path}",
        f"  state       running: process {process.pid} on {os.uname().nodename} (SLURM job 77), phase train",
        "  step        40 of 100 (40%), about 2 min 00 s left",
        "  speed       0.5 steps/s, 25 tokens/s",
        "  metrics     step 40: loss 0.025",
        "  evaluation  step 30: eval_a_loss 0.7, eval_b_loss 0.8",
        "  attempt     3, 2 in a row without a newer checkpoint, requeued 1 time; resumed after step 20",
        f"  updated     {values['time'].replace('T', ' ').replace('Z', ' UTC')}",
    ]


def test_a_run_whose_process_was_killed(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        write_status(tmp_path, state="running", pid=process.pid, phase="save")
        reader = RunReader(tmp_path)
        assert reader.read().state == "running"
    os.utime(tmp_path / STATUS, (BEGAN, BEGAN + 300))
    found = reader.read()
    assert (found.state, found.alive, found.over, found.eta_seconds) == ("lost", False, True, None)
    assert found.last_heartbeat == "2026-09-21T14:18:20Z"
    assert "no heartbeat since 2026-09-21 14:18:20 UTC: process" in status_line(found)
    assert "is gone in phase save" in status_line(found)


def test_a_run_on_a_file_system_without_locks_is_watched(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the observer's clock alone: that of the run's host is two hours behind."""
    monkeypatch.setattr(life, "is_locked", lambda folder: None)
    write_status(tmp_path, state="running", pid=1, time="2026-01-01T00:00:00Z")
    reader = RunReader(tmp_path)
    found = reader.read()
    assert (found.state, found.alive, found.settled) == ("running", None, False)
    assert "no heartbeat seen yet" in status_line(found)
    clock.now += SILENT_S - 1
    assert not reader.read().settled
    write_log(tmp_path, [start()])
    found = reader.read()
    assert (found.state, found.alive) == ("running", True)
    assert re.fullmatch(r"the clock of node7 is \d+ s behind that of the file system", found.notes[0])
    clock.now += SILENT_S - 1
    assert reader.read().alive, "one write lasts as long"
    clock.now += 1
    found = reader.read()
    assert (found.state, found.reason) == ("lost", "nothing was written for 20 s")


def test_files_from_the_future_are_told(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        write_status(tmp_path, state="running", pid=process.pid, time="2100-01-01T00:00:00Z")
        os.utime(tmp_path / STATUS, (4102444800, 4102444800))
        found = view(tmp_path)
    assert found.alive and re.match(r"the clock of the file system is \d+ s ahead of this machine's", found.notes[0])


def test_the_end_is_not_taken_for_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends between two looks: it said running, and then had nothing that holds the folder any more."""
    with holding(tmp_path):
        write_status(tmp_path, state="running")
    look = Pulse.look

    def end_first(pulse: Pulse) -> Any:
        write_status(tmp_path, state="finished", step=100)
        return look(pulse)

    monkeypatch.setattr(Pulse, "look", end_first)
    assert view(tmp_path).state == "finished"


def test_ends(tmp_path: Path) -> None:
    for values, said in (
        ({"state": "preempted", "signal": "SIGUSR1"}, "preempted by SIGUSR1"),
        ({"state": "stopped", "signal": "STOP"}, "stopped by STOP"),
        ({"state": "failed", "error": "the GPU is out of memory"}, "failed: the GPU is out of memory"),
        ({"state": "finished", "step": 100}, "finished"),
    ):
        write_status(tmp_path, **values)
        write_log(tmp_path, [start(), entry(1, 1, 1), entry(40, 40, 40)])
        found = view(tmp_path)
        assert (found.state, found.over, found.eta_seconds) == (values["state"], True, None)
        assert status_line(found).split("; ")[0] == said


def test_a_next_attempt_that_has_not_written_its_status_yet(tmp_path: Path) -> None:
    with holding(tmp_path) as process:
        write_status(tmp_path, state="preempted", signal="SIGTERM", pid=process.pid + 1)
        found = view(tmp_path)
        assert (found.state, found.over) == ("preempted", False)
        assert f"preempted by SIGTERM; process {process.pid} on" in status_line(found)
        write_status(tmp_path, state="running", pid=process.pid + 1)  # the one before was killed
        assert view(tmp_path).state == "starting"


def test_a_finished_run(tmp_path: Path) -> None:
    write_status(tmp_path, state="finished", step=100)
    write_log(tmp_path, [start(), entry(99, 40, 900), entry(100, 50, 1000), *end({"train": 30.0, "save": 10.0})])
    (tmp_path / "report.md").touch()
    found = view(tmp_path)
    assert (found.steps_per_second, found.tokens_per_second) == (2.0, 20.0), "over the whole run"
    assert found.phases_of == "the whole run" and found.report == str(tmp_path / "report.md")
    lines = text(tmp_path).splitlines()
    first = lines.index("  phases      train: 30.0 s (75%)")
    assert lines[first + 1 : first + 3] == ["              save: 10.0 s (25%)", "              (the whole run)"]


def test_runs_of_a_version_without_a_status(tmp_path: Path) -> None:
    """Log, lock and checkpoints alone."""
    write_checkpoint(tmp_path, 30)
    found = view(tmp_path)
    assert (found.state, found.step, found.total_steps, found.run) == ("unknown", 30, 100, "r")
    assert found.phases["train"]["seconds"] == 3.0 and found.phases_of == "up to checkpoint-30"
    write_log(tmp_path, [start(), entry(30, 30, 30), entry(40, 40, 40)])
    found = view(tmp_path)
    assert (found.state, found.step, found.method, found.name) == ("unknown", 40, "kto", "a run")
    assert "unknown: " in status_line(found)
    with holding(tmp_path):
        assert view(tmp_path).state == "running"
    assert view(tmp_path).state == "lost"
    write_log(tmp_path, [start(), entry(100, 40, 40), *end({"train": 1.0})])
    assert view(tmp_path).state == "finished"


def test_a_half_written_status(tmp_path: Path) -> None:
    whole = write_status(tmp_path, state="running").text()
    write_log(tmp_path, [start(), entry(40, 40, 40)])
    for content in ("", whole[:100], "[]", '{"state": "flying"}', "[" * 5000, whole.replace("40", '"forty"', 1)):
        (tmp_path / STATUS).write_text(content)
        found = view(tmp_path)
        assert (found.state, found.step) == ("unknown", 40)
        assert len(found.problems) == 1 and found.problems[0].startswith("status.json: cannot be read (")
    (tmp_path / STATUS).write_text(whole.replace("40", "4" + "0" * 400, 1))
    assert "out of range" in view(tmp_path).problems[0] and text(tmp_path)


@pytest.mark.parametrize("name", [STATUS, "log.jsonl", LOCK, "checkpoint-7", "report.md"])
def test_a_folder_in_the_place_of_a_file_and_the_other_way_round(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, 3)
    if name == "checkpoint-7":
        (tmp_path / name).write_text("no folder")
    else:
        (tmp_path / name).mkdir()
    found = view(tmp_path)
    assert [one.step for one in found.checkpoints] == [3]
    assert [problem.partition(":")[0] for problem in found.problems] == (
        [name] if name in (STATUS, "log.jsonl") else []
    )
    assert text(tmp_path)


# Checkpoints --------------------------------------------------------------------------------------------------------


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def flipped(folder: Path) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[1000] ^= 1
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says", "seen_by_size"),
    [
        (truncated, "model.safetensors: has 100 bytes instead of 3000", True),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: missing", True),
        (lambda folder: (folder / "manifest.json").unlink(), "contains a model but no manifest.json", True),
        (lambda folder: os.truncate(folder / "manifest.json", 50), "manifest.json: cannot be read", True),
        (lambda folder: (folder / "manifest.json").write_text("[" * 9000), "manifest.json: cannot be read", True),
        (flipped, "model.safetensors: the content has changed since it was written", False),
    ],
)
def test_an_incomplete_checkpoint(
    tmp_path: Path, damage: Callable[[Path], None], says: str, seen_by_size: bool
) -> None:
    for step in (5, 10, 100):
        write_checkpoint(tmp_path, step)
    damage(tmp_path / "checkpoint-10")
    for read_all in (False, True):
        views = RunReader(tmp_path, read_all=read_all).read().checkpoints
        assert [one.step for one in views] == [100, 10, 5]
        complete = [one.problem is None for one in views]
        assert complete == [True, not (seen_by_size or read_all), True]
        if not complete[1]:
            assert (views[1].problem or "").startswith(says)
            assert f"checkpoint-10   incomplete: {says}" in "\n".join(
                status_lines(RunReader(tmp_path, read_all=read_all).read())
            )


def test_contents_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkpoint that stays; one that takes its name is another."""
    from alignment.checkpoint.manifest import Manifest

    folder, read = write_checkpoint(tmp_path, 5), []
    compare = Manifest.check_contents
    monkeypatch.setattr(
        Manifest, "check_contents", lambda self, *given: (read.append(self.step), compare(self, *given))
    )
    reader = RunReader(tmp_path, read_all=True)
    assert reader.read().checkpoints[0].problem is None and reader.read().checkpoints[0].problem is None
    assert read == [5]
    os.utime(folder / "manifest.json", (1, 1))
    reader.read()
    assert read == [5, 5]


def test_checkpoints_that_are_being_written_or_hold_the_model_only(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5, resumable=False)
    (tmp_path / ".checkpoint-10.partial").mkdir()
    (tmp_path / ".checkpoint-1.removed").mkdir()
    found = view(tmp_path)
    assert found.partial == [".checkpoint-10.partial"] and found.phases == {}
    said = text(tmp_path)
    assert (
        "checkpoint-5  complete, 0.0 MB, weights only" in said
        and ".checkpoint-10.partial  incomplete: the run ended while writing it" in said
    )


def test_many_checkpoints(tmp_path: Path) -> None:
    for step in range(1, 13):
        folder = write_checkpoint(tmp_path, step)
        if step in (2, 12):
            truncated(folder)
    said = text(tmp_path)
    assert said.count(" complete, 0.0 MB") == 7 and "and 4 older, 1 of them incomplete" in said


# What is no run -----------------------------------------------------------------------------------------------------


def test_folders_without_a_run(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    checkpoint = write_checkpoint(run, 5)
    (tmp_path / "file").touch()
    for folder, says in (
        (tmp_path / "none", "no such folder"),
        (tmp_path / "file", "not a folder"),
        (tmp_path, "not the output folder of a run: it has no status.json, no log.jsonl and no checkpoint"),
        (run.parent, "it contains runs in one"),
        (checkpoint, f"it is a checkpoint: pass the output folder, {run}"),
    ):
        with pytest.raises(OutputError, match=re.escape(says)):
            RunReader(folder)


# JSON ---------------------------------------------------------------------------------------------------------------


def test_every_key_is_documented_and_its_value_is_json(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 5)
    write_status(tmp_path, state="finished")
    write_log(tmp_path, [start(), entry(1, 1, 1, kl=math.nan, norm=math.inf)])
    values = view(tmp_path).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False))["metrics"] == {"loss": 1.0, "kl": None, "norm": None}
    documented = (ROOT / "docs" / "guides" / "watching.md").read_text()
    missing = [key for key in (*values, *values["checkpoints"][0]) if f"`{key}`" not in documented]
    assert missing == []
