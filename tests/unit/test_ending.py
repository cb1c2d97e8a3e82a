"""The reason for the end of a job is reported and the process exits, whatever hangs or fails meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from fake_store import Ended, ended

from alignment.run import ending
from alignment.run.activity import Activity
from alignment.run.ending import Ending, end_with


@pytest.fixture(autouse=True)
def one_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An exit that a test survives, and short time limits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ending, "_mute", lambda: None)
    monkeypatch.setattr(ending, "end_process", ended)
    monkeypatch.setattr(ending.threading, "Timer", lambda *_: SimpleNamespace(start=lambda: None))
    for name in ("_WRITE_S", "_REPORT_S", "_LATER_S"):
        monkeypatch.setattr(ending, name, 0.2)


def hang(*_: Any, **__: Any) -> None:
    time.sleep(20)


@pytest.mark.parametrize("what", ["disk", "terminal"])
def test_what_hangs_is_not_waited_for(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "disk":
        os.mkfifo(tmp_path / "hang-0.txt")  # without a reader, open() does not return
        monkeypatch.setattr(ending, "record", lambda made, record=ending.record: record(made, 0.2))
        activity = SimpleNamespace(folder=tmp_path, status=SimpleNamespace(update=hang))
        monkeypatch.setattr(ending, "ACTIVITY", activity)
    else:
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=hang, flush=hang))
    begun = time.monotonic()
    with pytest.raises(Ended) as end:
        end_with(Ending("error: rank 1 hangs", 85, stacks=what == "disk"), last=hang)
    assert time.monotonic() - begun < 5 and end.value.code == 85
    assert capsys.readouterr().err == ("error: rank 1 hangs\n" if what == "disk" else "")


@pytest.mark.parametrize("what", ["write_stacks", "record"])
def test_errors_do_not_prevent_the_exit(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ending, what, fail)
    with pytest.raises(Ended) as end:
        end_with(Ending("the line", 85, stacks=True))
    assert end.value.code == 85


@pytest.mark.parametrize(("made", "drawn"), [
    (Ending("error: it failed"), True), (Ending("", 0, "finished"), False), (Ending("hung", stacks=True), False),
    (Ending("stopped", 85, "preempted", "SIGTERM"), False),
])  # fmt: skip
def test_the_report_of_a_failure_follows_its_status(
    made: Ending, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops or finishes has drawn it before; one that hangs or is killed has no time for it."""
    activity, happened = Activity(), list[str]()
    activity.status = SimpleNamespace(update=lambda **values: happened.append(values["state"]))  # type: ignore[assignment]

    def draw() -> None:
        time.sleep(0.1)  # it is waited for
        happened.append("report")

    activity.at_failure = draw
    monkeypatch.setattr(ending, "ACTIVITY", activity)
    ending.record(made)
    assert happened == [made.state, *(["report"] if drawn else [])]


def test_a_process_ends_with_its_workers_whatever_hangs() -> None:
    code = """
import os, time
from alignment.run import ending
ending._LONGEST_S = ending._REPORT_S = 0.2
ending._mute = lambda: time.sleep(60)
worker = os.fork()
if not worker:
    time.sleep(60)
print(worker, flush=True)
ending.end_with(ending.Ending("", 7))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        assert process.wait(30) == 7
    end = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
