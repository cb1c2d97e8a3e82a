"""The lock of an output folder: one writer, regardless of where an earlier one ran and was killed."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import DRIVERS, ROOT
from small_disk import fill, full, small_disk

from alignment.checkpoint import lock as lock_module
from alignment.checkpoint.lock import LOCK, OutputLock
from alignment.checkpoint.owner import Owner, process_start
from alignment.config.errors import OutputError
from alignment.training.checkpointing.output_folder import check_output_folder

HERE = Owner.this_process()
ELSEWHERE = dataclasses.replace(HERE, host="n2", boot="another", space="pid:[1]", pid=7, start="70")


def driver(*arguments: object) -> subprocess.Popen[str]:
    """A process without torch."""
    command = [sys.executable, str(DRIVERS / "lock_owner.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of ``tmp_path``."""
    process = driver("hold", tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


class Observer:
    """Simulated time: waiting takes none; ``during`` is called in each wait with the elapsed seconds."""

    def __init__(self, during: Callable[[float], object] = lambda seconds: None) -> None:
        self.now, self.during, self.told = 1000.0, during, []

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.during(self.now - 1000)

    def lock(self, folder: Path, **changes: Any) -> OutputLock:
        own = dataclasses.replace(Owner.this_process(), **changes)
        return OutputLock(folder, own=own, tell=self.told.append, clock=lambda: self.now, wait=self.wait)


def left(folder: Path, owner: Owner | bytes, beat: int = 0) -> Path:
    """Leave a lock file of this owner."""
    text = owner if isinstance(owner, bytes) else owner.text()
    path = folder / LOCK
    path.write_bytes(text.replace(b"           0}", f"{beat:>12}}}".encode()))
    return path


def named(path: Path) -> Any:
    return json.loads(path.read_text())


def no_wait(seconds: float) -> None:
    """For takeovers without watching: only the short final check may wait."""
    assert seconds < 1


def test_a_lock_names_its_process_and_is_removed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "3", "SLURM_CLUSTER_NAME": "c"}.items():
        monkeypatch.setenv(name, value)
    lock = OutputLock(tmp_path / "new" / "run")
    lock.peek()
    assert not (tmp_path / "new").exists(), "peek() changes nothing"
    with lock:
        said = named(lock.path)
        assert (said["pid"], said["job"], said["restarts"], said["cluster"]) == (os.getpid(), "12", 3, "c")
        assert said["start"] == process_start(os.getpid()) and said["heartbeat"] == 0
        assert [path.name for path in lock.folder.iterdir()] == [LOCK]
        lock.acquire()
        assert named(lock.path) == said, "it already holds it"
        lock.check()
        check_output_folder(lock.folder, False)
    assert list(lock.folder.iterdir()) == []
    lock.release()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "many")
    assert Owner.this_process().restarts == 0


def test_a_lock_appears_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked, link = [], os.link

    def looked_at(source: Path, target: Path) -> None:
        linked.append(Owner.parsed(source.read_bytes()))
        link(source, target)

    monkeypatch.setattr(os, "link", looked_at)
    with OutputLock(tmp_path) as lock:
        assert linked == [lock._own]


def test_the_heartbeat_is_updated_in_place_until_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.005)
    others = set(threading.enumerate())
    lock = OutputLock(tmp_path)
    lock.acquire()
    before = lock.path.stat()
    (heart,) = (each for each in set(threading.enumerate()) - others if each.name == "output-lock")
    assert heart.daemon
    deadline = time.monotonic() + 10
    while named(lock.path)["heartbeat"] < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    after = lock.path.stat()
    assert named(lock.path)["heartbeat"] >= 3
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size), "a full disk has no other bytes"
    copy = lock.path.read_bytes()
    lock.release()
    assert not heart.is_alive() and not lock.path.exists()
    assert Owner.parsed(copy) is not None


def test_a_living_process_is_not_disturbed(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    before = Owner.parsed((tmp_path / LOCK).read_bytes())
    lock = OutputLock(tmp_path, wait=no_wait)
    for attempt in (lock.peek, lock.acquire):
        with pytest.raises(OutputError) as caught:
            attempt()
        assert str(caught.value) == (
            f"output_dir: {tmp_path} is in use by process {holder.pid} on {HERE.host}; wait for it to finish, "
            "stop it, or choose another output_dir"
        )
    lock.release()
    assert Owner.parsed((tmp_path / LOCK).read_bytes()) == before
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_killed_process_is_succeeded_immediately(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{holder.pid}").exists(), "its parent has not reaped it"
    lock = OutputLock(tmp_path, wait=no_wait)
    lock.peek()
    lock.acquire()
    assert named(lock.path)["pid"] == os.getpid() and [path.name for path in tmp_path.iterdir()] == [LOCK]
    lock.release()


def test_a_process_may_end_while_it_holds_the_lock(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    holder.communicate(timeout=20)  # the heartbeat thread does not prevent it
    assert holder.returncode == 0 and not (tmp_path / LOCK).exists()  # released when the process exited


def test_a_reused_pid_is_not_the_owner(holder: subprocess.Popen[str], tmp_path: Path) -> None:
    owner = Owner.parsed((tmp_path / LOCK).read_bytes())
    assert owner is not None
    left(tmp_path, dataclasses.replace(owner, start=owner.start + "0"))
    with OutputLock(tmp_path, wait=no_wait) as lock:
        assert named(lock.path)["pid"] == os.getpid()


def test_a_second_trainer_of_the_same_process_succeeds_the_first(tmp_path: Path) -> None:
    told: list[str] = []
    first, second, other = (OutputLock(tmp_path, tell=told.append, wait=no_wait) for _ in range(3))
    other.acquire()
    first.acquire()
    other.release()
    assert named(first.path)["token"] == first._own.token
    second.peek()
    second.acquire()
    with pytest.raises(OutputError, match="is in use by process"):
        first.check()
    first.release()
    second.check()
    assert second.path.exists() and not told
    second.release()
    assert not second.path.exists()


def test_from_elsewhere_a_heartbeat_without_change_for_a_minute_is_stale(tmp_path: Path) -> None:
    observer = Observer()
    left(tmp_path, ELSEWHERE, beat=41)
    lock = observer.lock(tmp_path)
    lock.peek()
    assert observer.now == 1000 and not observer.told
    lock.acquire()
    assert 60 <= observer.now - 1000 < 65
    assert observer.told == [
        f"output_dir: {tmp_path}/.lock is held by process 7 on n2; waiting up to 60 s for a heartbeat"
    ]
    assert named(lock.path)["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize("beats", [1, 20, 59])
def test_from_elsewhere_one_heartbeat_proves_life(beats: int, tmp_path: Path) -> None:
    def during(seconds: float) -> None:
        if seconds >= beats:
            left(tmp_path, ELSEWHERE, beat=42)

    observer = Observer(during)
    left(tmp_path, ELSEWHERE, beat=41)
    with pytest.raises(OutputError, match=r"is in use by process 7 on n2; wait for it to finish"):
        observer.lock(tmp_path).acquire()
    assert observer.now - 1000 == beats and named(tmp_path / LOCK)["heartbeat"] == 42
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_the_file_changes_in_the_meantime(tmp_path: Path) -> None:
    path = left(tmp_path, ELSEWHERE)
    gone = Observer(lambda seconds: path.unlink(missing_ok=True) if 3 <= seconds < 4 else None)
    lock = gone.lock(tmp_path)
    lock.acquire()
    assert 3 <= gone.now - 1000 < 5
    lock.release()

    left(tmp_path, ELSEWHERE)
    third = dataclasses.replace(ELSEWHERE, host="n3", token="n3")
    beating = Observer(lambda seconds: left(tmp_path, third, beat=int(seconds)) if seconds >= 3 else None)
    with pytest.raises(OutputError, match="is in use by process 7 on n3"):
        beating.lock(tmp_path).acquire()
    assert 3 < beating.now - 1000 < 6


def test_a_suspended_observer_keeps_watching(tmp_path: Path) -> None:
    """Its own machine, or the file system, may have been stalled while the owner could not update its heartbeat."""

    def during(seconds: float) -> None:
        if seconds == 5:
            observer.now += 300
        if seconds > 320:
            left(tmp_path, ELSEWHERE, beat=43)

    observer = Observer(during)
    left(tmp_path, ELSEWHERE, beat=41)
    with pytest.raises(OutputError, match="is in use"):
        observer.lock(tmp_path).acquire()


@pytest.mark.parametrize("torn", [b"", b"\0" * 200, HERE.text()[:50], b"[]\n", b'{"pid": 1}\n', b"\xff\xfe"])
def test_a_torn_file_is_watched_like_one_from_elsewhere(torn: bytes, tmp_path: Path) -> None:
    left(tmp_path, torn)
    observer = Observer()
    lock = observer.lock(tmp_path)
    lock.peek()
    lock.acquire()
    assert observer.now - 1000 >= 60
    assert observer.told == [
        f"output_dir: {tmp_path}/.lock is held by an unknown process (unreadable file); waiting up to 60 s for a "
        "heartbeat"
    ]
    lock.release()


@pytest.mark.parametrize(
    ("old", "new", "at_once"),
    [
        ({"job": "5", "restarts": 0}, {"job": "5", "restarts": 1}, True),
        ({"job": "5", "restarts": 1}, {"job": "5", "restarts": 10}, True),
        ({"job": "5", "restarts": 1}, {"job": "5", "restarts": 1}, False),
        ({"job": "5", "restarts": 2}, {"job": "5", "restarts": 1}, False),
        ({"job": "4", "restarts": 0}, {"job": "5", "restarts": 1}, False),
        ({"job": "", "restarts": 0}, {"job": "", "restarts": 1}, False),
        ({"job": "5", "restarts": 0, "cluster": "a"}, {"job": "5", "restarts": 1, "cluster": "b"}, False),
    ],
)
def test_a_requeued_job_succeeds_itself(
    old: dict[str, Any], new: dict[str, Any], at_once: bool, tmp_path: Path
) -> None:
    left(tmp_path, dataclasses.replace(ELSEWHERE, **old))
    observer = Observer()
    lock = observer.lock(tmp_path, **new)
    lock.acquire()
    assert (observer.now - 1000 < 1) == at_once
    lock.release()


def test_a_requeued_job_does_not_disturb_a_process_that_it_can_see(holder: Any, tmp_path: Path) -> None:
    owner = Owner.parsed((tmp_path / LOCK).read_bytes())
    assert owner is not None
    left(tmp_path, dataclasses.replace(owner, job="5"))
    with pytest.raises(OutputError, match=r"\(SLURM job 5\); wait for it"):
        Observer().lock(tmp_path, job="5", restarts=1).acquire()


@pytest.mark.parametrize("other", ["space", "boot", "host"])
def test_pids_are_not_compared_across_containers_and_machines(other: str, tmp_path: Path) -> None:
    """Containers of the same name, each with a process 1 that even started at the same tick."""
    left(tmp_path, dataclasses.replace(HERE, token="other", **{other: "another"}))
    observer = Observer()
    lock = observer.lock(tmp_path)
    lock.peek()
    lock.acquire()
    assert observer.now - 1000 >= 60
    lock.release()


def test_hidden_processes_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc mounted with hidepid shows users only their own processes."""

    def denied(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    gone = subprocess.Popen(["true"])
    gone.wait()
    assert process_start(gone.pid) is None
    monkeypatch.setattr(os, "kill", denied)
    left(tmp_path, dataclasses.replace(HERE, pid=gone.pid, token="other"))
    observer = Observer()
    lock = observer.lock(tmp_path)
    lock.acquire()
    assert observer.now - 1000 >= 60
    lock.release()


def test_exactly_one_of_many_wins(tmp_path: Path) -> None:
    process = driver("race", tmp_path, 10, 5)
    out, _ = process.communicate(timeout=60)
    assert out == " ".join("1" * 10) + "\n\n", "one winner each, and nothing left in the folder"


@pytest.mark.slow
def test_exactly_one_of_many_wins_every_round(tmp_path: Path) -> None:
    process = driver("race", tmp_path, 200, 8)
    out, _ = process.communicate(timeout=300)
    assert out == " ".join("1" * 200) + "\n\n"


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_was_replaced_in_the_meantime_is_restored(
    links: bool, holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock across all hosts: another process has replaced the stale file since the last check."""
    living = (tmp_path / LOCK).read_bytes()
    left(tmp_path, dataclasses.replace(HERE, start="0", token="dead"))
    rename = os.rename

    def late(source: Path, target: Path) -> None:
        (tmp_path / LOCK).write_bytes(living)
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    if not links:
        monkeypatch.setattr(os, "link", without_links)
    with pytest.raises(OutputError, match=f"is in use by process {holder.pid} "):
        OutputLock(tmp_path, wait=no_wait).acquire()
    assert (tmp_path / LOCK).read_bytes() == living and [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_a_successor_whose_file_was_moved_notices(tmp_path: Path) -> None:
    """The opposite case: a third process has created its file while the second had moved the old one."""
    left(tmp_path, dataclasses.replace(HERE, start="0", token="dead"))
    third = dataclasses.replace(ELSEWHERE, host="n3")
    observer = Observer(lambda seconds: left(tmp_path, third))
    lock = observer.lock(tmp_path)
    with pytest.raises(OutputError, match="is in use by process 7 on n3"):
        lock.acquire()
    lock.release()
    assert named(tmp_path / LOCK)["host"] == "n3"


def test_a_run_that_was_mistaken_for_dead_notices(tmp_path: Path) -> None:
    lock = OutputLock(tmp_path)
    lock.check()  # not acquired, so nothing to check
    lock.acquire()
    lock.path.unlink()
    lock.check()
    assert named(lock.path)["token"] == lock._own.token, "recreated after it was removed"
    left(tmp_path, ELSEWHERE)
    with pytest.raises(OutputError, match="is in use by process 7 on n2"):
        lock.check()
    lock.release()
    assert named(lock.path)["host"] == "n2"


def test_turns_are_for_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_TURN_S", 0.05)
    first, second = OutputLock(tmp_path), OutputLock(tmp_path)
    with first._turn():
        descriptor = os.open(tmp_path, os.O_RDONLY)
        assert not lock_module._locked(descriptor)
        start = time.monotonic()
        with second._turn():  # a process suspended while holding it must not block the others
            assert time.monotonic() - start > 0.04
    assert lock_module._locked(descriptor)
    os.close(descriptor)

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(lock_module.fcntl, "flock", unsupported)
    with OutputLock(tmp_path) as lock:
        assert lock.path.exists()


def without_links(*_: Any) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_a_file_system_without_links(
    holder: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", without_links)
    with pytest.raises(OutputError, match="is in use"):
        OutputLock(tmp_path).acquire()
    holder.kill()
    holder.wait()
    with OutputLock(tmp_path, wait=no_wait) as lock:
        assert named(lock.path)["pid"] == os.getpid() and [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert list(tmp_path.iterdir()) == []


def test_a_repeated_request_is_not_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may report that the name exists because its own first request created it."""
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    with OutputLock(tmp_path, wait=no_wait) as lock:
        assert lock.path.exists()


def test_a_fork_does_not_hold_the_lock(tmp_path: Path) -> None:
    with OutputLock(tmp_path) as lock:
        pid = os.fork()
        if not pid:
            lock.release()
            os._exit(0)
        os.waitpid(pid, 0)
        assert lock.path.exists()
        lock.check()


def test_a_folder_that_disappears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.005)
    told: list[str] = []
    lock = OutputLock(tmp_path / "run", tell=told.append)
    lock.acquire()
    heart = lock._heartbeat
    assert heart is not None
    lock.path.unlink()
    lock.folder.rmdir()
    heart.join(timeout=10)
    assert not heart.is_alive(), "its heartbeat is invisible"
    lock.release()
    assert not told and not lock.folder.exists()


def test_a_full_disk_prevents_a_lock_but_not_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.005)
    with small_disk(tmp_path / "disk") as disk:
        lock = OutputLock(disk / "run")
        lock.acquire()
        fill(disk)
        before = named(lock.path)["heartbeat"]
        deadline = time.monotonic() + 10
        while named(lock.path)["heartbeat"] < before + 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert named(lock.path)["heartbeat"] >= before + 3
        lock.release()
        fill(disk)
        with pytest.raises(OutputError, match="cannot be locked: No space left on device"):
            OutputLock(disk / "other").acquire()
        assert not any((disk / "other").iterdir())


def test_a_failed_heartbeat_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.005)
    tried, write = [], os.pwrite

    def fails_at_first(*arguments: Any) -> int:
        tried.append(1)
        if len(tried) < 3:
            raise full(tmp_path)
        return write(*arguments)

    monkeypatch.setattr(os, "pwrite", fails_at_first)
    with OutputLock(tmp_path) as lock:
        deadline = time.monotonic() + 10
        while named(lock.path)["heartbeat"] < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        assert named(lock.path)["heartbeat"] >= 3


def test_folders_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"^output_dir: .*/file/run cannot be locked: Not a directory; choose"):
        OutputLock(tmp_path / "file" / "run").acquire()
    OutputLock(tmp_path / "file" / "run").peek()
    lock = OutputLock(tmp_path, tell=(told := []).append)
    lock.acquire()

    def read_only(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", read_only)
        lock.release()
    assert told == [f"output_dir: {lock.path} could not be removed: Read-only file system"]


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for name in (f"{LOCK}.abc.new", f"{LOCK}.abc.old", ".other"):
        (tmp_path / name).write_text("")
    check_output_folder(tmp_path / "new", False)
    with pytest.raises(OutputError, match="is not empty"):
        check_output_folder(tmp_path, False)
    with OutputLock(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, ".other"]
