"""Monitoring of a process: progress and its limits, heartbeats, stop requests, launchers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from alignment.checkpoint import owner
from alignment.engines.launch_env import NOTICE
from alignment.run import launchers as watch_launchers
from alignment.run.activity import Activity, Limits
from alignment.run.beats import Beat, Heard, Pulse, hung_rank, in_collective
from alignment.run.deadlines import bounded
from alignment.run.ending import write_stacks
from alignment.run.launchers import Launcher, launcher_name, stop_notice
from alignment.run.processes import Watched
from alignment.run.requests import StopRequests
from alignment.run.signals import SignalWatch
from alignment.run.stop import RunStopped, StopReason


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a torchrun worker."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# Progress ------------------------------------------------------------------------------------------------------------


def test_the_limit_of_a_phase_follows_its_history() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.limits = Limits(least=10, factor=5, first=60)
    with activity("rollout"):
        assert (activity.phase, activity.limit) == ("rollout", 60)
        clock.now += 15
        assert activity.idle == 15
        activity.progress()
        assert activity.idle == 0 and activity.limit == 75, "five times the longest interval exceeds the first limit"
    assert activity.phase == "start"
    with activity("rollout"):
        assert activity.limit == 75
    with activity("save"):
        clock.now += 1
    with activity("save"):
        assert activity.limit == 10, "completed once, and shorter than the minimum limit"


def test_a_failed_phase_does_not_count_as_completed() -> None:
    activity = Activity(Clock())
    activity.limits = Limits(least=10, factor=5, first=60)
    with pytest.raises(ValueError), activity("load"):
        raise ValueError
    with activity("load"):
        assert activity.limit == 60


def test_suspended_time_does_not_count() -> None:
    clock = Clock()
    activity = Activity(clock)
    assert activity.tick() == 0
    clock.now += 0.5
    assert activity.tick() == 0
    clock.now += 500
    assert activity.idle == 0.5, "requested before a watcher has seen it"
    assert activity.tick() == 500 and activity.tick() == 0, "one watcher is told"
    assert activity.idle == 0.5
    clock.now += 2
    assert activity.idle == 2.5, "time counts again"


def test_suspended_time_does_not_count_if_the_main_thread_resumes_first() -> None:
    """Otherwise hang detection would be off as long as the job was suspended, and lenient for the rest of the run."""
    clock = Clock()
    activity = Activity(clock)
    activity.limits = Limits(least=10, factor=5, first=60)
    with activity("step"):
        activity.tick()
    with activity("step"):
        clock.now += 500
        activity.progress()
        assert activity.tick() == 500
        assert activity.idle == 0 and activity.limit == 10
        clock.now += 2
        activity.tick()
        assert activity.idle == 2


def test_without_a_watcher_all_time_counts() -> None:
    clock = Clock()
    activity = Activity(clock)
    clock.now += 500
    assert activity.idle == 500


def test_a_forked_worker_has_its_own_locks() -> None:
    """The parent's locks may be held by a thread that a fork does not copy."""
    code = """
import os
from alignment.run.requests import REQUESTS
from alignment.run.activity import ACTIVITY
ACTIVITY._lock.acquire()
REQUESTS._lock.acquire()
pid = os.fork()
if not pid:
    ACTIVITY.progress()
    print(ACTIVITY._lock.locked(), flush=True)
    os._exit(0)
os._exit(os.waitpid(pid, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=20)
    assert (done.returncode, done.stdout) == (0, "False\n")


def beat(moves: int, *, over: bool = True, waiting: bool = True, finished: bool = False, idle: float = 9.0) -> Beat:
    return Beat(
        count=1, host="n1", machine="m", pid=1, phase="train", step=3,
        moves=moves, idle=idle, over=over, waiting=waiting, finished=finished,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("beats", "rank"),
    [
        ([beat(5), beat(4, waiting=False)], 1),
        ([beat(5), beat(4, waiting=False, over=False)], None),  # a long rollout that makes progress
        ([beat(5, waiting=False), beat(4)], 0),  # activity takes precedence over progress
        ([beat(5, waiting=False), beat(4, waiting=False)], 1),
        ([beat(5), beat(5)], 0),
        ([beat(5, idle=8.0), beat(5, idle=9.0)], 1),
        ([beat(7, finished=True, over=False), beat(5)], 1),  # a finished rank waits for the others
        ([beat(7, finished=True), beat(7, finished=True)], None),
    ],
)
def test_the_rank_that_hangs(beats: list[Beat], rank: int | None) -> None:
    assert hung_rank(dict(enumerate(beats))) == rank


def test_silence_is_measured_by_the_observers_clock() -> None:
    clock = Clock()
    heard, first = Heard(clock), beat(1)
    heard.hear({1: first, 2: first})
    clock.now += 4
    heard.hear({1: replace(first, count=2), 2: first})  # the latter is the same heartbeat, read again
    clock.now += 2
    assert heard.silent(5) == [2] and heard.silent(7) == []
    heard.pardon(3)
    assert heard.silent(5) == []
    heard.pardon(100)
    clock.now += 6
    assert heard.silent(5) == [1, 2], "the future is not pardoned"
    assert Beat.parsed(first.text()) == first


def test_a_rank_without_any_heartbeat_is_silent_after_the_start_period() -> None:
    clock = Clock()
    heard = Heard(clock, awaited=[1, 2], allowance=30)
    clock.now += 3
    heard.hear({1: beat(1)})
    clock.now += 30
    assert heard.silent(5) == [1]
    clock.now += 3
    assert heard.silent(5) == [1, 2]


def test_ranks_forward_stop_requests() -> None:
    first, second, third = (StopRequests() for _ in range(3))
    pulses = [Pulse(rank, requests) for rank, requests in enumerate((first, second, third))]
    assert pulses[1].beat().asked == 0
    second.request(StopReason.SIGTERM)
    pulses[0].heed(pulses[1].beat())
    assert (first.reason, first.detail) == (StopReason.SIGTERM, "received by rank 1")
    pulses[2].heed(pulses[0].beat())  # which forwards it
    assert (third.reason, third.detail) == (StopReason.SIGTERM, "received by rank 1")
    first.request(StopReason.SIGINT)
    for pulse in pulses[1:]:
        pulse.heed(pulses[0].beat())
    assert (second.reason, second.detail) == (StopReason.SIGINT, "received by rank 0")
    pulses[0].heed(pulses[2].beat())
    assert (first.reason, first.detail) == (StopReason.SIGINT, ""), "its own"


def test_machines_without_proc_are_distinguished_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_boot", "_space"):
        monkeypatch.setattr(owner, name, lambda: "")
    machines = []
    for host in ("n1", "n2"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        machines.append(Pulse().machine)
    assert machines[0] != machines[1]


def test_a_collective_is_found_in_the_stack() -> None:
    code = "def all_reduce(): return in_collective()\nanswer = all_reduce()"
    inside = {"in_collective": in_collective}
    exec(compile(code, "/lib/torch/distributed/distributed_c10d.py", "exec"), inside)
    assert inside["answer"] and not in_collective()


def test_calls_that_do_not_return_are_abandoned(tmp_path: Path) -> None:
    start = time.monotonic()
    assert bounded(lambda: time.sleep(5), 0.05) is None and time.monotonic() - start < 2
    assert bounded(lambda: 7, 5) == 7
    assert bounded(lambda: 1 // 0, 5) is None
    path = write_stacks(tmp_path, 3)
    assert path == tmp_path / "hang-3.txt" and "test_calls_that_do_not_return" in path.read_text()
    assert write_stacks(tmp_path / "absent", 3) is None


# Requests ------------------------------------------------------------------------------------------------------------


def test_the_first_request_sets_the_reason_and_ctrl_c_overrides_it() -> None:
    requests = StopRequests()
    assert requests.asked() is None
    for number in (signal.SIGUSR1, signal.SIGTERM):
        requests.request(StopReason.of_signal(number))
    assert requests.reason is StopReason.SIGUSR1
    requests.request(StopReason.STOP)
    requests.request(StopReason.SIGTERM)
    assert requests.reason is StopReason.STOP, "a user's request overrides a launcher's"
    requests.request(StopReason.SIGINT, "typed")
    requests.request(StopReason.SIGTERM)
    assert requests.reason is StopReason.SIGINT and requests.detail == "typed"
    assert (StopReason.SIGINT.state, StopReason.SIGINT.code) == ("stopped", 130)
    assert (StopReason.SIGUSR1.state, RunStopped(StopReason.SIGUSR1, "text").code) == ("preempted", 85)
    requests.forget()
    assert requests.reason is None


def test_the_stop_file_is_polled(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "STOP"
    requests = StopRequests(clock)
    file.touch()
    assert requests.asked() is None, "its location is not known"
    file.unlink()
    with requests.deferred(file):
        assert requests.deferring and requests.asked() is None
        file.touch()
        clock.now += 0.5
        assert requests.asked() is None
        assert requests.asked(every=0.0) is StopReason.STOP
    assert not requests.deferring


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/usr/bin/python3", "-u", "-m", "deepspeed.launcher.launch", "--world_info=x"], "deepspeed.launcher.launch"),
        (["/v/bin/python", "/v/bin/deepspeed", "train.py"], "deepspeed"),
        (["/v/bin/python3.11", "/v/bin/torchrun", "train.py"], "torchrun"),
        (["python", "-X", "dev", "-m", "torch.distributed.run"], "torch.distributed.run"),
        (["slurmstepd: [17.0]"], "slurmstepd"),
        (["python", "train.py", "deepspeed"], ""),
        (["python", "-c", "deepspeed"], ""),
        (["python", "-m", "pytest", "torchrun"], ""),
        (["bash", "-c", "torchrun train.py"], ""),
        (["less", "/v/bin/torchrun"], ""),
        (["-bash"], ""),
        (["python"], ""),
        ([], ""),
    ],
)
def test_launchers_are_recognized_by_their_command(command: list[str], name: str) -> None:
    assert launcher_name(command) == name


def orphans(tmp_path: Path, parent: str) -> str:
    """Whether a process with a parent of this name considers itself orphaned."""
    program = tmp_path / parent
    program.symlink_to(os.path.realpath(sys.executable))
    child = "from alignment.run.launchers import orphaned; print(orphaned())"
    code = f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {child!r}], check=True)"
    done = subprocess.run([program, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("parent", "orphan"), [("init", "True\n"), ("python-of-a-launcher", "False\n")])
def test_a_launcher_that_exited_before_the_start_is_detected(tmp_path: Path, parent: str, orphan: str) -> None:
    assert orphans(tmp_path, parent) == orphan


def test_a_process_without_a_launcher_is_not_orphaned(tmp_path: Path) -> None:
    assert orphans(tmp_path, "init") == "False\n"


def test_a_suspended_process_is_detected() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        watched = Watched.begin(child.pid)
        assert not watched.stopped
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert watched.stopped and not watched.gone
        watched.kill()
    assert not watched.stopped


def test_the_notice_is_that_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (NOTICE, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(NOTICE, "120")
    assert stop_notice() == (120.0, NOTICE)
    monkeypatch.delenv(NOTICE)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    scontrol = tmp_path / "scontrol"
    answer = "echo 'KillOnBadExit = 0'\necho 'KillWait                = 45 sec'\n"
    scontrol.write_text(f"#!/bin/sh\n[ \"$*\" = 'show config' ] || exit 1\n{answer}")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert stop_notice() == (45.0, "SLURM's KillWait")
    monkeypatch.setattr(watch_launchers, "launchers", lambda: [Launcher(1, "torchrun", ("torchrun", "train.py"))])
    assert stop_notice() == (30.0, "torchrun --shutdown-timeout"), "the shorter of both"
    monkeypatch.setattr(watch_launchers, "launchers", lambda: [Launcher(1, "slurmstepd")])
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert stop_notice() == (30.0, "SLURM's default KillWait")


@pytest.mark.parametrize(
    ("name", "command", "variables", "seconds"),
    [
        ("torchrun", "torchrun --shutdown-timeout 120 train.py", {}, 120),
        ("torchrun", "torchrun --shutdown_timeout=7 train.py", {}, 7),
        ("torch.distributed.run", "python -m torch.distributed.run --shutdown-timeout=90 x", {}, 90),
        ("torchrun", "torchrun train.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50"}, 50),
        ("torchrun", "torchrun --shutdown-timeout 60 x", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50"}, 60),
        ("torchrun", "torchrun train.py", {}, 30),
        ("deepspeed", "deepspeed train.py", {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50"}, 30),
    ],
)
def test_the_notice_of_a_launcher_is_read_from_its_command(
    name: str, command: str, variables: dict[str, str], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (NOTICE, "SLURM_JOB_ID", "PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.delenv(each, raising=False)
    for each, value in variables.items():
        monkeypatch.setenv(each, value)
    monkeypatch.setattr(watch_launchers, "launchers", lambda: [Launcher(1, name, tuple(command.split()))])
    notice = stop_notice()
    assert notice is not None and notice.seconds == seconds


def test_the_end_of_a_process_is_noticed() -> None:
    child = subprocess.Popen(["sleep", "60"])
    watched = Watched.begin(child.pid)
    assert not watched.gone
    watched.kill()
    child.wait(10)
    assert watched.gone
    watched.kill()  # nothing to do
    watched.close()
    assert Watched.begin(child.pid).gone


# Signals, in a separate process --------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from alignment.run.guard import guarded
from alignment.run.requests import REQUESTS

def kill(name): os.kill(os.getpid(), getattr(signal, name))

def main():
    kind = sys.argv[1]
    if kind == "loading":
        kill("SIGTERM")
        time.sleep(20)
    if kind == "deaf":  # a call into C that holds on
        import threading, ctypes
        threading.Timer(0.2, kill, ["SIGTERM"]).start()
        mutex = ctypes.create_string_buffer(64)
        for _ in range(2):  # which no signal ends
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    if kind == "deferred":
        with REQUESTS.deferred(None):
            for name in ("SIGUSR1", "SIGTERM", "SIGHUP"):
                kill(name)
                time.sleep(0.1)
            print(REQUESTS.asked().name, flush=True)
    if kind == "twice":
        with REQUESTS.deferred(None):
            kill("SIGINT")
            kill("SIGINT")  # a launcher repeats it
            time.sleep(2.1)
            print("still here", flush=True)
            kill("SIGINT")
            time.sleep(20)
    if kind == "ignored":
        kill("SIGHUP")
        kill("SIGINT")
        print("survived", flush=True)
    if kind == "worker":
        pid = os.fork()
        if not pid:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.3)
        for name in ("SIGUSR1", "SIGHUP", "SIGINT", "SIGTERM"):  # the worker lives until the last
            os.kill(pid, getattr(signal, name))
            time.sleep(0.1)
        print(os.waitpid(pid, 0)[1], REQUESTS.reason)

sys.exit(guarded(main))
"""


def run(kind: str, ignoring: tuple[signal.Signals, ...] = ()) -> subprocess.CompletedProcess[str]:
    def ready() -> None:  # the shell that runs the tests may ignore some
        for each in (signal.SIGINT, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN if each in ignoring else signal.SIG_DFL)

    return subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, cwd=ROOT, timeout=60, preexec_fn=ready
    )


@pytest.mark.parametrize(
    ("kind", "code", "out", "err"),
    [
        ("loading", 85, "", "preempted by SIGTERM in phase start; no training step was in progress\n"),
        ("deferred", 0, "SIGUSR1\n", "SIGUSR1: saving a checkpoint at the next safe point, then stopping\n"),
        ("worker", 0, f"{signal.SIGTERM.value} None\n", ""),
    ],
)
def test_signals(kind: str, code: int, out: str, err: str) -> None:
    done = run(kind)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


@pytest.mark.ci
def test_an_unresponsive_main_thread_is_not_waited_for() -> None:
    start = time.monotonic()
    done = run("deaf")
    assert done.returncode == 85 and time.monotonic() - start < 15
    assert done.stderr == "preempted immediately by SIGTERM in phase start after step 0\n"


def test_a_second_ctrl_c_exits_immediately() -> None:
    done = run("twice")
    assert (done.returncode, done.stdout) == (130, "still here\n")
    first, last = done.stderr.splitlines()
    assert first.endswith("then stopping; press Ctrl-C again to exit immediately")
    assert last == "stopped immediately by SIGINT in phase start after step 0"


def test_signals_ignored_at_the_end_stay_ignored_and_the_thread_is_not_waited_for() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    watch = SignalWatch(StopRequests(), lambda reason: None)
    try:
        with watch.listening([signal.SIGUSR1, signal.SIGHUP]):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            time.sleep(0.1)  # the thread waits for a signal
            start = time.monotonic()
        assert time.monotonic() - start < 0.3
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_ignored_at_the_start_stay_ignored() -> None:
    """As with `nohup`, or in the background of a script."""
    done = run("ignored", (signal.SIGHUP, signal.SIGINT))
    assert (done.returncode, done.stdout, done.stderr) == (0, "survived\n", "")
