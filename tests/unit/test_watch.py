"""Monitoring of one process: progress and its limits, stop requests, launchers, signals, hangs, status.json."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from alignment.config.options_faults import FaultOptions
from alignment.run import activity as activities
from alignment.run import stacks
from alignment.run.activity import Activity
from alignment.run.processes import launcher_name
from alignment.run.requests import StopRequests
from alignment.run.stacks import DeadManSwitch
from alignment.run.stop import RunStopped, StopReason
from alignment.training import stopping


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# Progress ------------------------------------------------------------------------------------------------------------


def test_the_limit_of_a_phase_follows_its_history() -> None:
    activity = Activity()
    activity.limits = FaultOptions(hang_timeout=10, hang_factor=5, hang_timeout_first=60)
    with activity("rollout"):
        assert (activity.phase, activity.limit) == ("rollout", 60)
        activity.now += 15
        assert activity.idle == 15
        activity.progress()
        assert activity.idle == 0 and activity.limit == 75, "five times the longest interval exceeds the first limit"
    assert activity.phase == "start"
    with activity("rollout"):
        assert activity.limit == 75
    with activity("save"):
        activity.now += 1
    with activity("save"):
        assert activity.limit == 10, "completed once, and shorter than the minimum limit"
    with pytest.raises(ValueError), activity("load"):
        raise ValueError
    with activity("load"):
        assert activity.limit == 60, "a failed phase does not count as completed"


def test_suspended_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(activities.time, "monotonic", clock)
    activity = Activity()
    for seconds in (0.5, 500, 2):
        clock.now += seconds
        activity.tick()
    assert activity.idle == activity.now == 0.5 + 2 + 2


# Requests ------------------------------------------------------------------------------------------------------------


def test_the_first_request_sets_the_reason_and_the_users_overrides_it() -> None:
    requests = StopRequests()
    assert requests.asked() is None
    for number in (signal.SIGUSR1, signal.SIGTERM):
        requests.request(StopReason.of_signal(number))
    assert requests.reason is StopReason.SIGUSR1
    requests.request(StopReason.STOP)
    requests.request(StopReason.SIGTERM)
    assert requests.reason is StopReason.STOP
    requests.request(StopReason.SIGINT, "typed")
    requests.request(StopReason.SIGTERM)
    assert str(requests) == "SIGINT (typed)"
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
        ("/usr/bin/python3 -u -m deepspeed.launcher.launch --world_info=x", "deepspeed.launcher.launch"),
        ("/v/bin/python3.11 /v/bin/torchrun train.py", "torchrun"),
        ("slurmstepd: [17.0]", "slurmstepd"),
        ("python train.py deepspeed", ""),
        ("python -c deepspeed", ""),
        ("bash -c torchrun train.py", ""),
        ("less /v/bin/torchrun", ""),
        ("", ""),
    ],
)
def test_launchers_are_recognized_by_their_command(command: str, name: str) -> None:
    assert launcher_name(command.split()) == name


def test_the_notice_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable, that of SLURM and of the launchers; without any of them, there is none."""
    for name in (stopping.NOTICE, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(stopping, "launchers", list)
    assert stopping.notice_too_short(1000, 1) is None
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert stopping.notice_too_short(29, 1) is None and "30 s" in str(stopping.notice_too_short(30, 1))
    monkeypatch.setenv(stopping.NOTICE, "120")
    assert stopping.notice_too_short(119, 1) is None and "120 s" in str(stopping.notice_too_short(120, 1))


# Hangs ---------------------------------------------------------------------------------------------------------------


def test_stacks_are_local_if_the_folder_does_not_respond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setattr(stacks.tempfile, "tempdir", str(local))
    monkeypatch.setattr(stacks, "_COPY_S", 0.2)
    stacks.write_stacks(tmp_path, 3)
    assert "test_stacks_are_local" in (tmp_path / "hang-3.txt").read_text() and not list(local.iterdir())
    os.mkfifo(tmp_path / "hang-4.txt")  # without a reader, open() does not return
    stacks.write_stacks(tmp_path, 4)
    assert "test_stacks_are_local" in next(local.iterdir()).read_text()


def test_the_dead_man_switch_is_set_again_only_after_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most once a second; it leaves a timer of someone else alone, and no file behind."""
    times: list[float] = []
    cancelled: list[int] = []
    monkeypatch.setattr(stacks, "_set", lambda seconds, **_: times.append(seconds))
    monkeypatch.setattr(stacks, "_cancel", lambda: cancelled.append(1))
    monkeypatch.setattr(stacks, "_of_others", False)
    monkeypatch.setattr(stacks, "_EVERY_S", 0.0)
    switch = DeadManSwitch(0, exits=True)
    assert switch._file is not None
    path = Path(switch._file.name)
    for mark, seconds in ((1, 10.0), (1, 11.0), (2, 12.0)):
        switch.keep(mark, seconds)
    monkeypatch.setattr(stacks, "_EVERY_S", 60.0)
    switch.keep(3, 13.0)
    assert times == [10, 12] and path.exists()
    monkeypatch.setattr(stacks, "_EVERY_S", 0.0)
    faulthandler.dump_traceback_later(3600)
    times.clear()
    switch.keep(4, 14.0)
    switch.disarm()
    assert not times and not cancelled and not path.exists()
    monkeypatch.setattr(stacks, "_of_others", False)
    switch.keep(5, 15.0)
    assert not times, "it is disarmed"


# A process whose phase "work" may take one second without progress.
HANGS = """
import re, sys, time
from pathlib import Path
from alignment.cli.guarded import guarded
from alignment.run import protection
from alignment.config.options_faults import FaultOptions
from alignment.run.activity import ACTIVITY

def main():
    ACTIVITY.limits = FaultOptions(hang_timeout=1.0, hang_timeout_first=1.0)
    with protection.protected(Path(sys.argv[2]), ACTIVITY.limits), ACTIVITY("work"):
        if sys.argv[1] == "lock":
            re.match("(a+)+b", "a" * 40)
        time.sleep(4)
    print("continued", flush=True)

protection._MARGIN_S = 1.0
main() if sys.argv[1] == "script" else sys.exit(guarded(main))
"""


def hang(kind: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HANGS, kind, str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, env=environment)


def test_a_hanging_command_ends_even_if_its_disk_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hang-0.txt")
    done = hang("command", tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert re.match(r"error: no progress for \d s .* in phase work, step 0", done.stderr)
    assert any("in main" in path.read_text() for path in tmp_path.glob("alignment-hang-0-*"))


def test_a_hanging_script_of_one_process_continues(tmp_path: Path) -> None:
    """It may be a notebook, or be stopped in a debugger."""
    done = hang("script", tmp_path)
    assert (done.returncode, done.stdout) == (0, "continued\n")
    assert done.stderr.count("no progress for") == 1 and "in main" in (tmp_path / "hang-0.txt").read_text()


def test_a_held_interpreter_lock_ends_the_process(tmp_path: Path) -> None:
    """No Python code runs any more, so the stacks stay in the local file."""
    done = hang("lock", tmp_path)
    assert done.returncode == 1
    assert any("in main" in path.read_text() for path in tmp_path.glob("alignment-hang-0-*"))


# Signals, in a separate process --------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from alignment.cli.guarded import guarded
from alignment.run.requests import REQUESTS

def kill(name): os.kill(os.getpid(), getattr(signal, name))

def main():
    kind = sys.argv[1]
    if kind == "loading":
        kill("SIGTERM")
        time.sleep(20)
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


def test_a_second_ctrl_c_exits_immediately() -> None:
    done = run("twice")
    assert (done.returncode, done.stdout) == (130, "still here\n")
    first, last = done.stderr.splitlines()
    assert first.endswith("then stopping; press Ctrl-C again to exit immediately")
    assert last == "stopped immediately by SIGINT in phase start after step 0"


def test_signals_ignored_at_the_start_stay_ignored() -> None:
    """As with `nohup`, or in the background of a script."""
    done = run("ignored", (signal.SIGHUP, signal.SIGINT))
    assert (done.returncode, done.stdout, done.stderr) == (0, "survived\n", "")


def test_a_forked_child_exits_while_the_switch_is_armed(tmp_path: Path) -> None:
    """faulthandler would wait in the child for a thread that only its parent has; the parent's switch stays armed."""
    code = """
import os, sys, time
from alignment.run.stacks import DeadManSwitch
DeadManSwitch(0, exits=True).keep(1, 3.0)
child = os.fork()
if not child:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
time.sleep(60)
"""
    command, environment = [sys.executable, "-c", code], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, env=environment)
    assert (done.returncode, done.stdout) == (1, "3\n"), done.stderr
