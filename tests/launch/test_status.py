"""The command ``status``: fast, quiet, and in place on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT
from run_folders import entry, holding, start, write_checkpoint, write_log, write_status

from alignment.cli import status
from alignment.cli.status import main
from alignment.engines.inspecting import life
from alignment.engines.inspecting.view import RunView
from tools.ranks.client import environment

COMMAND = [sys.executable, str(ROOT / "launch" / "status.py")]


def outcome(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run that exists only as files, and a process that could be it."""
    with holding(folder) as process:
        write_log(folder, [start(), entry(1, 1, 10), entry(40, 40, 400)])
        write_status(folder, state="running", pid=process.pid)
        yield process


def test_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, 40)
    write_status(tmp_path, state="preempted", signal="SIGUSR1")
    assert outcome(tmp_path) == 0
    out = capsys.readouterr().out
    assert "state       preempted by SIGUSR1\n" in out and "checkpoint-40  complete" in out
    assert outcome(tmp_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["checkpoints"][0]["complete"]) == ("preempted", True)


def test_exit_statuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(tmp_path / "none") == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: no such folder\n"
    write_log(tmp_path, [start(), entry(4, 4, 4)])
    (tmp_path / "status.json").write_text('{"state": "runn')
    assert outcome(tmp_path) == 1
    told = capsys.readouterr()
    assert "step        4 of 100" in told.out, "what can be read is shown"
    assert re.fullmatch(r"error: \S+: status.json: cannot be read \(.*\)\n", told.err)
    assert outcome() == 2 and outcome("--help") == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--follow", "--interval", "0"), "argument --interval: '0': expected seconds, from 0.1 to 86400"),
        (("--follow", "--interval", "soon"), "argument --interval: 'soon': expected seconds, from 0.1 to 86400"),
        (("--follow", "--interval", "nan"), "argument --interval: 'nan': expected seconds"),
        (("--interval", "5"), "argument --interval: 5 has no effect without --follow; add --follow or drop it"),
    ],
)
def test_invalid_intervals(
    given: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(tmp_path, state="finished")
    assert outcome(tmp_path, *given) == 2
    assert f"error: {says}" in capsys.readouterr().err


def test_content_is_only_compared_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path, 4)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for arguments, complete in (((), True), (("--check",), False)):
        assert outcome(tmp_path, "--json", *arguments) == 0
        assert json.loads(capsys.readouterr().out)["checkpoints"][0]["complete"] is complete


def test_no_large_library_is_imported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 4)
    code = (
        "import sys\nfrom alignment.cli.commands import main\n"
        f"try:\n    main(['status', {str(tmp_path)!r}])\nexcept SystemExit as left:\n    assert left.code == 0\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'datasets', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.endswith("\n[]\n"), done.stdout + done.stderr


def test_watching_a_file_system_without_locks_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "is_locked", lambda folder: None)
    write_status(tmp_path, state="running", pid=1)
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            write_log(tmp_path, [start()])

    monkeypatch.setattr(time, "sleep", sleep)
    assert outcome(tmp_path) == 0
    told = capsys.readouterr()
    assert "state       running: " in told.out and len(slept) == 3
    assert told.err == f"watching {tmp_path} for a heartbeat, up to 20 s\n"


def test_following_by_lines(tmp_path: Path) -> None:
    """One line per change, until the process has exited."""
    with running(tmp_path) as process:
        follow = subprocess.Popen(
            [*COMMAND, str(tmp_path), "--follow", "--interval", "0.1"], stdout=subprocess.PIPE, text=True
        )
        assert follow.stdout is not None
        first = follow.stdout.readline()
        assert "running: process" in first and "40 of 100 (40%), about 1 min 00 s left; 1 steps/s" in first
        write_status(tmp_path, state="running", pid=process.pid, step=41)
        assert "41 of 100" in follow.stdout.readline()
    try:
        rest, _ = follow.communicate(timeout=10)
    finally:
        follow.kill()
    assert rest.count("\n") == 1 and "no heartbeat since" in rest and follow.returncode == 0


def test_missed_polls_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a folder does not respond for a minute, polling continues every 2 seconds, without 30 immediate polls."""
    now, paused = [0.0], []

    class Slow:
        def __init__(self, folder: Path, *, read_all: bool) -> None:
            self.takes = iter([60.0, 0.5, 0.5, 0.5])

        def read(self) -> RunView:
            now[0] += next(self.takes)
            return RunView(str(tmp_path), "finished" if len(paused) == 3 else "running")

    def sleep(seconds: float) -> None:
        paused.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(status, "RunReader", Slow)
    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    assert outcome(tmp_path, "--follow") == 0
    assert paused == [0.0, 1.5, 1.5]


def test_following_as_json(tmp_path: Path) -> None:
    write_status(tmp_path, state="stopped", signal="SIGINT")
    done = subprocess.run([*COMMAND, str(tmp_path), "--follow", "--json"], capture_output=True, text=True)
    assert done.returncode == 0 and [json.loads(line)["state"] for line in done.stdout.splitlines()] == ["stopped"]


def test_following_on_a_terminal_until_ctrl_c(tmp_path: Path) -> None:
    """Lines are overwritten; SIGINT ends it without further output and with exit status 0."""
    ours, theirs = pty.openpty()
    with running(tmp_path) as process:
        restored = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
        follow = subprocess.Popen(
            [*COMMAND, str(tmp_path), "--follow", "--interval", "0.1"],
            stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "60", "LINES": "5"}, preexec_fn=restored,
        )  # fmt: skip
        os.close(theirs)
        seen = ""
        while "41 of 100" not in seen:
            seen += os.read(ours, 10000).decode()
            if seen.count("\x1b[J") == 1:
                write_status(tmp_path, state="running", pid=process.pid, step=41)
        follow.send_signal(signal.SIGINT)
        assert follow.wait(timeout=20) == 0
    screens = seen.split("\x1b[J")[1:]
    assert all(screen.count("\n") == 4 and screen.endswith("\x1b[4F") for screen in screens[:-1]), "5 lines have room"
    assert max(len(line.rstrip("\r")) for line in screens[0].split("\n")) <= 60
    with pytest.raises(OSError):  # no more lines fit on the terminal
        while left := os.read(ours, 10000):
            assert b"Traceback" not in left and b"Interrupt" not in left
    os.close(ours)
