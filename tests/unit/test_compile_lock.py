"""The compilation lock of a killed process: torch's own lock, and processes that really hold it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from alignment.config.errors import AlignmentError
from alignment.engines import compile_lock
from alignment.engines.compile_lock import abandoned_locks_removed, wait_for_release

pytestmark = pytest.mark.ci

HOLD = """
import runpy, sys
baton = runpy.run_path(sys.argv[2])["FileBaton"](sys.argv[1])  # without the rest of torch
assert baton.try_acquire()
print("held", flush=True)
sys.stdin.readline()
baton.release()
"""
Hold = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the lock, on a disk that no other host or container shares; waits are short."""
    monkeypatch.setattr(compile_lock, "_is_private", lambda folder: True)
    monkeypatch.setattr(compile_lock, "_LOOK_S", 0.1)
    return tmp_path / "lock"


@pytest.fixture
def hold(path: Path) -> Iterator[Hold]:
    """Starts a process that holds the lock until it reads a line."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path), str(inspect.getsourcefile(FileBaton))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def acquired(path: Path) -> FileBaton:
    """The lock, taken as torch takes it before it compiles."""
    baton = FileBaton(str(path))
    with abandoned_locks_removed():
        assert baton.try_acquire()
    return baton


def test_a_killed_process_does_not_block_builds(path: Path, hold: Hold, capsys: pytest.CaptureFixture[str]) -> None:
    process = hold()
    process.kill()
    process.wait()
    assert path.exists() and not FileBaton(str(path)).try_acquire()
    waiting = threading.Thread(target=lambda: acquired(path).release(), daemon=True)
    waiting.start()
    waiting.join(5)
    assert not waiting.is_alive()
    assert capsys.readouterr().err == f"removed {path}, which a killed process had left\n"
    assert not path.exists()


def test_a_living_process_is_waited_for(
    path: Path, hold: Hold, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_lock, "_TELL_S", 0.3)
    monkeypatch.setattr(compile_lock, "_LIMIT_S", 0.5)  # only for processes that are not visible
    process = hold()
    waiting = threading.Thread(target=lambda: acquired(path).release())
    waiting.start()
    waiting.join(1.5)
    assert waiting.is_alive() and path.exists()
    process.communicate("continue\n", timeout=30)
    waiting.join(10)
    assert not waiting.is_alive() and not path.exists()
    assert capsys.readouterr().err == f"waiting for process {process.pid} to compile in {path.parent}\n"


@pytest.mark.parametrize("hidden", ["other hosts", "other users"])
def test_invisible_processes_are_waited_for_with_a_limit(
    hidden: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.touch()
    if hidden == "other hosts":
        monkeypatch.setattr(compile_lock, "_is_private", lambda folder: False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(compile_lock, "_LIMIT_S", 0.5)
    with pytest.raises(AlignmentError, match=rf"^{path} is a compilation lock that no process of this host has held"):
        wait_for_release(path)
    assert path.exists()


def test_a_lock_that_another_process_has_taken_is_kept(path: Path) -> None:
    path.touch()
    before = compile_lock._Lock.at(path)
    assert before is not None
    path.unlink()
    path.touch()
    os.utime(path, ns=(0, 0))  # the inode number may be the same
    assert not compile_lock._remove(path, before)
    assert path.exists()


def test_waiting_processes_compile_one_at_a_time(path: Path) -> None:
    path.touch()
    inside: list[int] = []
    most: list[int] = []

    def compile_something() -> None:
        baton = acquired(path)
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        baton.release()

    threads = [threading.Thread(target=compile_something) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1] * 4


def test_folders_for_which_every_process_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = os.stat("/proc/self/ns/pid").st_ino == compile_lock._FIRST_PID_SPACE
    for kind, private in {0xEF53: machine, 0x6969: False, 0x794C7630: True, None: False}.items():
        monkeypatch.setattr(compile_lock, "_file_system", lambda folder, kind=kind: kind)
        assert compile_lock._is_private(tmp_path) is private, kind
    monkeypatch.undo()
    assert compile_lock._file_system(Path("/proc")) == 0x9FA0
    assert compile_lock._file_system(tmp_path / "missing") is None
