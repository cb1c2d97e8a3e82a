"""The command ``status``: fast, quiet, and in place on a terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support.helpers import exit_status
from support.run_folders import HOLDER, entry, locked, start, write_checkpoint, write_log, write_status

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


def test_exit_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(tmp_path / "none") == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: no such folder\n"
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
        assert follow.stdout is not None
        assert f"running: {HOLDER}, phase start; 40 of 100 (40%), about 1 min 00 s left" in follow.stdout.readline()
        write_status(tmp_path, state="running", step=41)
        assert "41 of 100" in follow.stdout.readline()
    try:
        rest, _ = follow.communicate(timeout=10)
    finally:
        follow.kill()
    assert rest.count("\n") == 1 and "no heartbeat since" in rest and follow.returncode == 0
