"""The lock of an output folder: one run at a time, however the one before ended."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS, ROOT
from support.run_folders import holding

from alignment.config.errors import OutputError
from alignment.run import lock as run_lock
from alignment.run.lock import LOCK, RunLock, holder, is_locked


def driver(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(DRIVERS / "run_lock.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of ``tmp_path``."""
    process = driver("hold", tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_lock_names_its_process_and_is_removed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    folder = tmp_path / "new" / "run"
    lock = RunLock(folder)
    lock.refuse_if_held()
    assert not (tmp_path / "new").exists() and not is_locked(folder) and not holder(folder)
    lock.acquire()
    assert is_locked(folder) and holder(folder) == f"process {os.getpid()} on {socket.gethostname()} (SLURM job 12)"
    lock.check()
    lock.release()
    lock.release()
    assert not is_locked(folder) and not any(folder.iterdir())


@pytest.mark.parametrize("stopped", [False, True])
def test_a_living_process_is_not_disturbed(stopped: bool, other: subprocess.Popen[str], tmp_path: Path) -> None:
    """Suspended or not."""
    if stopped:
        other.send_signal(signal.SIGSTOP)
    lock = RunLock(tmp_path)
    for attempt in (lock.refuse_if_held, lock.acquire):
        with pytest.raises(OutputError, match=f"^output_dir: {tmp_path} is in use by process {other.pid} on"):
            attempt()
    lock.release()
    assert is_locked(tmp_path) and holder(tmp_path).startswith(f"process {other.pid} ")


def test_forked_workers_neither_hold_nor_release_the_lock(tmp_path: Path) -> None:
    process = driver("fork", tmp_path)
    worker = int(process.stdout.readline())
    try:
        assert process.stdout.readline() == "held\n"
        time.sleep(0.5)  # for its attempt to release the lock
        assert is_locked(tmp_path) and holder(tmp_path).startswith(f"process {process.pid} ")
        process.kill()
        process.wait()
        os.kill(worker, 0)
        assert not is_locked(tmp_path), "its worker is alive"
    finally:
        os.kill(worker, signal.SIGKILL)
        process.stdout.close()


def test_trainers_of_one_process_share_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = RunLock(tmp_path / "run"), RunLock(Path("run"))
    first.acquire()
    second.refuse_if_held()
    second.acquire()
    first.release()
    first.release()
    assert is_locked(tmp_path / "run") and holder(tmp_path / "run")
    second.check()
    second.release()
    assert not is_locked(tmp_path / "run")


def test_processes_are_never_in_a_folder_together(tmp_path: Path) -> None:
    processes = [driver("contend", tmp_path, 20) for _ in range(4)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0] * 4 and not any(tmp_path.iterdir())


@pytest.mark.parametrize("requeued", [False, True])
def test_a_requeued_job_waits(requeued: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its earlier start may still be ending, or the file server may hold the lock of a dead host for a while."""
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(int(requeued)))
    monkeypatch.setattr(run_lock, "_BRIEF_S", 0.2)
    assert run_lock._REQUEUED_S == 120
    with holding(tmp_path) as process:
        lock = RunLock(tmp_path)
        if not requeued:
            for attempt in (lock.refuse_if_held, lock.acquire):
                with pytest.raises(OutputError, match="is in use by process"):
                    attempt()
            return
        lock.refuse_if_held()
        end = threading.Timer(0.6, process.kill)
        end.start()
        lock.acquire()
        end.join()
    assert holder(tmp_path).startswith(f"process {os.getpid()} ")
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock = RunLock(tmp_path)
    lock.acquire()
    assert f"no file locks in {tmp_path}" in capsys.readouterr().out
    lock.check()
    lock.release()
    assert is_locked(tmp_path) is None and holder(tmp_path)
    RunLock(tmp_path).refuse_if_held()


def test_a_run_that_lost_its_lock_notices(tmp_path: Path) -> None:
    """The file was removed, or a file server gave the lock of a host that was cut off to another one."""
    lock = RunLock(tmp_path)
    lock.acquire()
    (tmp_path / LOCK).unlink()
    lock.check()
    (tmp_path / LOCK).write_text("process 7 on n2")
    with pytest.raises(OutputError, match="is in use by process 7 on n2"):
        lock.check()
    lock.release()
    assert holder(tmp_path) == "process 7 on n2"
