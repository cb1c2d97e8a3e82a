"""The command ``status``: fast, quiet, and in place on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from support.helpers import exit_status
from support.run_folders import HOLDER, at, end, entry, locked, start, write_checkpoint, write_log, write_status

from alignment.cli.status import main

COMMAND = [sys.executable, str(ROOT / "launch" / "status.py")]


def outcome(*arguments: object) -> object:
    return exit_status(main, [str(argument) for argument in arguments])


def test_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, 40)
    write_status(tmp_path, state="preempted", signal="SIGUSR1")
    assert outcome(tmp_path) == 0
    out = capsys.readouterr().out
    assert "state       preempted by SIGUSR1 after step 40\n" in out and "checkpoint-40  complete" in out
    assert outcome(tmp_path, "--json") == outcome(tmp_path, "--follow", "--json") == 0
    for found in map(json.loads, capsys.readouterr().out.splitlines()):
        assert (found["state"], found["checkpoints"][0]["complete"]) == ("preempted", True)


def test_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps, more in (("lr-10", 100, {}), ("lr-9", 40, {"state": "finished"}), ("lr-9b", 7, {})):
        evaluation = (
            {"eval_loss": 0.25, "step": steps, "time": at(90)} if name == "lr-9" else entry(steps, 1, 1, kl=2.0)
        )
        last = [{**end({})[-1], "ended_early": "why"}] if more else []
        write_log(tmp_path / name, [start(), entry(4, 4, 4), evaluation, *last])
        write_status(tmp_path / name, **{"state": "running", "step": 4, **more})
    for step in (9, 10):
        os.utime(write_checkpoint(tmp_path / "lr-9", step) / "manifest.json", (time.time() - 3630,) * 2)
    (tmp_path / "lr-9" / "checkpoint-10" / "model.safetensors").unlink()
    (tmp_path / "other").mkdir()
    with locked(tmp_path / "lr-9b"):
        assert outcome(tmp_path) == outcome(tmp_path, "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split("  +", re.sub("3. s old", "", line)) for line in lines[:4]] == [
        ["run", "state", "step", "newest metrics", "newest checkpoint"],
        ["lr-9", "finished early", "10/100", "step 40: eval_loss 0.25", "checkpoint-9, 1 h 00 min "],
        ["lr-9b", "running", "7/100", "step 7: loss 0.14286, kl 2"],
        ["lr-10", "lost", "100/100", "step 100: loss 0.01, kl 2"],
    ]
    assert [json.loads(line)["folder"] for line in lines[4:]] == [
        str(tmp_path / f"lr-{name}") for name in (9, "9b", 10)
    ]
    assert outcome(tmp_path / "lr-9") == 0 and "state       finished early" in capsys.readouterr().out
    (tmp_path / "lr-9b" / "status.json").write_text("{")
    (tmp_path / "lr-10" / "log.jsonl").write_text("torn\n")
    damaged = f"{tmp_path / 'lr-9b'}: status.json: cannot be read"
    assert outcome(tmp_path) == 1
    told = capsys.readouterr()
    assert told.err.startswith(f"error: {damaged}")
    assert f"\n{damaged}" in told.out and f"\n{tmp_path / 'lr-10'}: log.jsonl: 1 line cannot be read\n" in told.out


def test_exit_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for name in ("none", "file"):
        assert outcome(tmp_path / name) == 1
        assert capsys.readouterr().err == f"error: {tmp_path / name}: no such folder\n"
    write_log(tmp_path, [start(), entry(4, 4, 4)])
    (tmp_path / "status.json").write_text('{"state": "runn')
    assert outcome(tmp_path) == 1
    told = capsys.readouterr()
    assert "step        4 of 100" in told.out, "what can be read is shown"
    assert told.err.startswith(f"error: {tmp_path}: status.json: cannot be read (") and told.err.count("\n") == 1
    assert outcome() == 2 and outcome("--help") == 0
    assert outcome(tmp_path, "--follow", "--interval", "0") == outcome(tmp_path, "--interval", "5") == 2


def test_following_by_lines(tmp_path: Path) -> None:
    """One line per change, until the folder is released."""
    write_log(tmp_path, [start(), entry(1, 1, 10), entry(40, 40, 400)])
    write_status(tmp_path, state="running")
    with locked(tmp_path):
        follow = subprocess.Popen(
            [*COMMAND, str(tmp_path), "--follow", "--interval", "0.1"], stdout=subprocess.PIPE, text=True
        )
        assert f"running: {HOLDER}, phase start; 40 of 100 (40%), about 1 min 00 s left" in follow.stdout.readline()
        write_status(tmp_path, state="running", step=41)
        assert "41 of 100" in follow.stdout.readline()
    try:
        rest, _ = follow.communicate(timeout=10)
    finally:
        follow.kill()
    assert rest.count("\n") == 1 and "no heartbeat since" in rest and follow.returncode == 0


def test_following_a_folder_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what has changed, until all have ended."""
    for name, state in (("one", "finished"), ("two", "running")):
        write_status(tmp_path / name, state=state)
    changes = iter(({"state": "running", "step": 41}, {"state": "finished", "step": 100}))
    with contextlib.ExitStack() as holding:
        holding.enter_context(locked(tmp_path / "two"))

        def sleep(_: float) -> None:
            write_status(tmp_path / "two", **(change := next(changes)))
            if change["state"] == "finished":
                holding.close()

        monkeypatch.setattr(time, "sleep", sleep)
        assert outcome(tmp_path, "--follow") == 0
    lines = [line.partition("; ") for line in capsys.readouterr().out.splitlines()]
    assert [line[0].partition(",")[0] for line in lines] == [
        "one: finished", f"two: running: {HOLDER}", f"two: running: {HOLDER}", "two: finished"
    ]  # fmt: skip
    assert [line[2] for line in lines] == [f"{step} of 100 ({step}%)" for step in (40, 40, 41, 100)]
