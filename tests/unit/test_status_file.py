"""``status.json``: what it contains, that no step waits for it, and that an end waits for a few seconds at most."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from alignment.run import status_file
from alignment.run.status_file import RunStatus, StatusFile, fail_in_place_of, read_status
from tools.ranks.process import wait_until


def test_a_status_has_one_key_per_line(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    file = StatusFile(tmp_path, RunStatus(job="17", restarts=2))
    file.update(state="preempted", signal="SIGUSR1", checkpoint="checkpoint-4")
    text = (tmp_path / "status.json").read_text()
    for line in ('  "state": "preempted",', '  "signal": "SIGUSR1",', '  "job": "17",', '  "restarts": 2,'):
        assert line in text.splitlines()
    assert read_status(tmp_path) == file.status
    file.update(state="failed", error="the first end counts")
    assert file.status.state == "preempted" and file.status.error is None


def test_no_step_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write with its two fsyncs takes 0.4 s here; 200 steps, the first of which changes the state, wait for none."""
    synced, sync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.2), sync(descriptor), synced.append(1)))
    monkeypatch.setattr(status_file, "_EVERY_S", 0.05)
    file, spent = StatusFile(tmp_path, RunStatus(), lambda: {"phase": "train"}), 0.0
    for step in range(200):
        begin = time.perf_counter()
        file.update(state="running", step=step)
        spent += time.perf_counter() - begin
        assert spent < 0.2, step
        time.sleep(0.005)
    assert len(synced) >= 2
    wait_until(lambda: read_status(tmp_path).step == 199, 10)
    assert (read_status(tmp_path).state, read_status(tmp_path).phase) == ("running", "train")
    file.close()


def test_an_unresponsive_disk_loses_only_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a process waits for it for a moment; once it responds, the file matches the run."""
    answers, write = threading.Event(), status_file.replace_text
    monkeypatch.setattr(status_file, "replace_text", lambda path, text: (answers.wait(20), write(path, text)))
    monkeypatch.setattr(StatusFile.flush, "__defaults__", (0.1,))
    file, begin = StatusFile(tmp_path, RunStatus()), time.monotonic()
    file.update(state="running", step=3)
    file.update(state="preempted", signal="SIGTERM")
    file.close()
    assert time.monotonic() - begin < 2 and read_status(tmp_path) is None
    answers.set()
    wait_until(lambda: (read_status(tmp_path) or RunStatus()).state == "preempted", 10)
    assert (read_status(tmp_path).step, read_status(tmp_path).signal) == (3, "SIGTERM")


def test_a_disk_that_cannot_be_written_loses_only_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_file, "_EVERY_S", 0.01)
    file = StatusFile(tmp_path / "absent", RunStatus())
    file.update(state="running", step=4)
    assert file.flush(2.0)
    (tmp_path / "absent").mkdir()
    wait_until(lambda: read_status(tmp_path / "absent") is not None, 10)
    file.close()


def test_the_end_does_not_overwrite_a_later_attempt(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, RunStatus(host="n1", pid=17, started="then"))
    file.close()
    later = StatusFile(tmp_path, RunStatus(host="n1", pid=18, started="now"))
    later.close()
    file.update(state="finished")
    assert read_status(tmp_path) == later.status


@pytest.mark.parametrize("content", ["{", '{"state": "running", "pid": "17"}', '{"state": "gone"}'])
def test_the_end_replaces_a_damaged_file(content: str, tmp_path: Path) -> None:
    file = StatusFile(tmp_path, RunStatus(pid=17))
    file.close()
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(ValueError):
        read_status(tmp_path)
    file.update(state="finished")
    assert read_status(tmp_path) == file.status


def test_a_status_is_written_for_a_rank_that_was_killed(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, RunStatus("running", host="n1", pid=17, step=4))
    file.close()
    for host, pid in (("n1", 18), ("n2", 17)):
        fail_in_place_of(tmp_path, host, pid, "rank 0 was killed")
    assert read_status(tmp_path).state == "running", "it belongs to a later attempt"
    fail_in_place_of(tmp_path, "n1", 17, "rank 0 was killed")
    failed = read_status(tmp_path)
    assert (failed.state, failed.error, failed.step) == ("failed", "rank 0 was killed", 4)
    fail_in_place_of(tmp_path, "n1", 17, "once more")
    assert read_status(tmp_path) == failed
    fail_in_place_of(tmp_path / "absent", "n1", 17, "nowhere")
