"""The reason for the end of a job is reported and the process exits, whatever hangs or fails meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from support.fake_store import Ended, ended

from alignment.run import ending
from alignment.run.activity import Activity
from alignment.run.ending import Ending, end_with


@pytest.mark.parametrize("what", ["disk", "terminal", "temporary files", "processes", "an error"])
def test_what_hangs_is_not_waited_for(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(*_: Any, **__: Any) -> None:
        time.sleep(20 if what != "an error" else 1 / 0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ending.os, "_exit", ended)
    for name in ("_WRITE_S", "_REPORT_S", "_LATER_S"):
        monkeypatch.setattr(ending, name, 0.2)
    activity = SimpleNamespace(folder=tmp_path, status=SimpleNamespace(update=hang))
    monkeypatch.setattr(ending, "ACTIVITY", activity)
    monkeypatch.setattr(ending.shutil, "move", hang)
    monkeypatch.setattr(ending, "_LONGEST_S", 3.0)
    if what == "processes":
        monkeypatch.setattr(ending.psutil, "Process", hang)
    if what == "temporary files":
        monkeypatch.setattr(ending.tempfile, "NamedTemporaryFile", hang)
    if what == "terminal":
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=hang, flush=hang))
    begun = time.monotonic()
    with pytest.raises(Ended) as end:
        end_with(Ending("error: rank 1 hangs", 85, stacks=True), last=hang)
    assert time.monotonic() - begun < 5 and end.value.code == 85
    assert capsys.readouterr().err == ("" if what == "terminal" else "error: rank 1 hangs\n")


@pytest.mark.parametrize(("made", "state"), [
    (Ending("error: it failed"), "failed"), (Ending("", 0), "finished"), (Ending("hung", stacks=True), "failed"),
    (Ending("stopped", 85, "SIGTERM"), "preempted"),
])  # fmt: skip
def test_the_report_of_a_failure_follows_its_status(made: Ending, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that stops or finishes has drawn it before; one that hangs or is killed has no time for it."""
    activity, happened = Activity(), list[str]()
    activity.status = SimpleNamespace(update=lambda **values: happened.append(values["state"]))  # type: ignore[assignment]
    activity.at_failure = lambda: happened.append("report")
    monkeypatch.setattr(ending, "ACTIVITY", activity)
    ending.record(made)
    assert happened == [state, *(["report"] if made.line == "error: it failed" else [])]


def test_a_process_ends_with_its_workers() -> None:
    code = """
import os, time
from alignment.run.ending import Ending, end_with
worker = os.fork()
if not worker:
    time.sleep(60)
print(worker, flush=True)
end_with(Ending("", 7))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert done.returncode == 7
    worker, end = int(done.stdout), time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
