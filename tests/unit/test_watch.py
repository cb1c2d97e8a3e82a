"""Monitoring of one process: progress and its limits, stop requests and safe points, signals, launchers, hangs."""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT

from alignment.config.options_training import FaultOptions
from alignment.run import activity as activities
from alignment.run import ending, protection, stop
from alignment.run.activity import Activity
from alignment.run.ending import DeadManSwitch
from alignment.run.stop import REQUESTS, Cut, RunStopped, StopReason, StopRequests
from alignment.training import safe_points, stopping
from alignment.training.safe_points import SafePoint


class Clock:
    """A clock that a test advances, instead of the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
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
    monkeypatch.setattr(activities, "time", clock)
    activity = Activity()
    for seconds in (0.5, 500, 2):
        clock.now += seconds
        activity.tick()
    assert activity.idle == activity.now == 0.5 + 2 + 2


# Requests ------------------------------------------------------------------------------------------------------------


def test_the_first_request_counts_unless_a_user_makes_a_stronger_one() -> None:
    requests = StopRequests()
    assert requests.asked() is None
    for reason, detail, expected in (
        (StopReason.SIGUSR1, "a", "SIGUSR1 (a)"), (StopReason.SIGTERM, "b", "SIGUSR1 (a)"),
        (StopReason.STOP, "c", "STOP (c)"), (StopReason.STOP, "d", "STOP (c)"), (StopReason.SIGTERM, "e", "STOP (c)"),
        (StopReason.SIGINT, "f", "SIGINT (f)"), (StopReason.STOP, "g", "SIGINT (f)"),
        (StopReason.SIGTERM, "h", "SIGINT (f)"),
    ):  # fmt: skip
        requests.request(reason, detail)
        assert str(requests) == expected
    assert (StopReason.SIGINT.state, StopReason.SIGINT.code) == ("stopped", 130)
    assert (StopReason.SIGUSR1.state, RunStopped(StopReason.SIGUSR1, "text").code) == ("preempted", 85)
    requests.forget()
    assert requests.reason is None
    for reason in (StopReason.SIGHUP, StopReason.SIGUSR1):
        requests.request(reason)
    assert str(requests) == "SIGHUP"


def test_the_stop_file_is_polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file, requests = Clock(), tmp_path / "STOP", StopRequests()
    monkeypatch.setattr(stop, "time", clock)
    with requests.deferred(file):
        assert requests.deferring and requests.asked() is None
        file.touch()
        clock.now += 0.5
        assert requests.asked() is None
        assert requests.asked(every=0.0) is StopReason.STOP
    assert not requests.deferring


@pytest.mark.parametrize(
    ("command", "launches"),
    [
        ("/usr/bin/python3 -u -m deepspeed.launcher.launch --world_info=x", True),
        ("/v/bin/python3.11 /v/bin/torchrun train.py", True),
        ("slurmstepd: [17.0]", True),
        ("python train.py deepspeed", False),
        ("python -c deepspeed", False),
        ("bash -c torchrun train.py", False),
        ("less /v/bin/torchrun", False),
    ],
)
def test_launchers_are_recognized_by_their_command(
    command: str, launches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden() -> list[str]:
        raise protection.psutil.AccessDenied(1)

    parents = [SimpleNamespace(pid=7, cmdline=command.split), SimpleNamespace(pid=1, cmdline=hidden)]
    monkeypatch.setattr(protection.psutil, "Process", lambda: SimpleNamespace(parents=lambda: parents))
    assert protection.launchers() == [7] * launches


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


# Safe points ---------------------------------------------------------------------------------------------------------


class Windows:
    """Micro-batches that take some time each, and the times of the exchanges between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.at = Clock(), list[float]()
        monkeypatch.setattr(safe_points, "time", self.clock)
        self.point = SafePoint()
        monkeypatch.setattr(REQUESTS, "asked", lambda: self.at.append(self.clock.now) or REQUESTS.reason)
        monkeypatch.setattr(REQUESTS, "may_cut", True)

    def pass_(self, number: int, calls: int, seconds: float) -> None:
        for _ in range(number):
            for _ in range(calls):
                self.point()
                self.clock.now += seconds


def test_ranks_check_about_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """And more often when micro-batches become slow: only the launch of the first one was timed."""
    windows = Windows(monkeypatch)
    windows.pass_(1, 3, 0.01)
    windows.at.clear()
    windows.pass_(2, 64, 2.0)
    gaps = [after - before for before, after in zip(windows.at, windows.at[1:])]
    assert len(windows.at) > 100 and max(gaps[2:]) <= 4.0
    windows = Windows(monkeypatch)
    windows.pass_(1000, 11, 0.01)
    assert 50 < len(windows.at) < 80, "100 s"
    monkeypatch.setattr(REQUESTS, "reason", StopReason.STOP)
    with pytest.raises(Cut):
        windows.pass_(30, 11, 0.01)


def test_ranks_follow_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows(monkeypatch)
    monkeypatch.setattr(safe_points, "world_size", lambda: 2)
    # The other rank takes a second per call.
    monkeypatch.setattr(safe_points, "largest_numbers", lambda values: [values[0], max(values[1], 1.0)])
    windows.pass_(1, 101, 0.001)
    assert 45 <= len(windows.at) <= 55, "after every second one"


# Hangs ---------------------------------------------------------------------------------------------------------------


def no_thread(*_: Any, **__: Any) -> None:
    raise RuntimeError("unable to start watchdog thread")


def test_the_dead_man_switch_leaves_a_timer_of_someone_else_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it is cancelled before a fork and at the end; and it leaves no file behind."""
    monkeypatch.setattr(faulthandler, "dump_traceback_later", faulthandler.dump_traceback_later)
    switch, times, cancelled = DeadManSwitch(), list[float](), list[int]()
    monkeypatch.setattr(switch, "_set", lambda seconds, **_: times.append(seconds))
    monkeypatch.setattr(switch, "_cancel", lambda: cancelled.append(1))
    with switch.armed(10.0, exits=True):
        path = Path(switch._file.name)
        switch.keep(11.0)
        with switch.armed(12.0, exits=True):
            switch.pause()
            setting = threading.Thread(target=switch.keep, args=(12.5,), daemon=True)
            setting.start(), setting.join(0.2)
            assert setting.is_alive(), "until the process has forked"
            switch.lock.release(), setting.join(5)
        switch.keep(math.inf)
        with monkeypatch.context() as patch:
            patch.setattr(switch, "_set", no_thread)
            switch.keep(12.8)
    switch.keep(13.0)
    assert times == [10, 11, 12.5, ending._MONTH_S] and cancelled == [1, 1] and not path.exists()
    with switch.armed(14.0, exits=True):
        faulthandler.dump_traceback_later(3600)
        switch.keep(15.0)
    assert times[4:] == [14, 3600] and cancelled == [1, 1]


def test_what_the_switch_of_a_notebook_has_written_is_moved_to_the_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", faulthandler.dump_traceback_later)
    monkeypatch.setattr(ending.ACTIVITY, "folder", tmp_path)
    with DeadManSwitch().armed(0.1, exits=False):
        time.sleep(0.5)
    assert "moved_to_the_output_folder" in (tmp_path / "hang-0.txt").read_text()


# A process whose phase "work" may take one second without progress.
HANGS = """
import re, sys, time
from pathlib import Path
from alignment.cli.guarded import guarded
from alignment.run import protection
from alignment.config.options_training import FaultOptions
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


@pytest.mark.parametrize(
    ("kind", "code", "out", "stacks"),
    [
        ("command", 1, "", "**/alignment-hang-0-*"),  # it ends even if its disk hangs
        ("script", 0, "continued\n", "hang-0.txt"),  # it may be a notebook, or be stopped in a debugger
        ("lock", 1, "", "alignment-hang-0-*"),  # no Python code runs any more, so the stacks stay in the local file
    ],
)
def test_a_hanging_process(kind: str, code: int, out: str, stacks: str, tmp_path: Path) -> None:
    if kind == "command":
        (tmp_path / "hang-0.txt" / "taken").mkdir(parents=True)
    command, environment = [sys.executable, "-c", HANGS, kind, str(tmp_path)], {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, env=environment)
    assert (done.returncode, done.stdout) == (code, out)
    assert kind == "lock" or done.stderr.count("no progress for") == 1
    assert kind != "command" or re.match(r"error: no progress for \d s .* phase work, step 0", done.stderr)
    assert any("in main" in path.read_text() for path in tmp_path.glob(stacks))


# Signals, in a separate process --------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from alignment.cli.guarded import guarded
from alignment.config.options_training import FaultOptions
from alignment.run.activity import ACTIVITY
from alignment.run import protection
from alignment.run.stop import REQUESTS

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
            time.sleep(0.6)
            print(REQUESTS.asked().name, flush=True)
            REQUESTS.done = True
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
        signal.signal(signal.SIGUSR1, lambda *_: print("own handler", flush=True))
        kill("SIGUSR1")
        time.sleep(1)
        print("survived", flush=True)
    if kind == "launcher":
        protection.state_of = lambda pid: "gone"
        time.sleep(20)
    if kind in ("files", "bug"):
        protection.state_of = lambda pid: os.stat("/missing") if kind == "files" else 1 // 0
        time.sleep(2.5)
        kill("SIGTERM")
        time.sleep(20)
    if kind == "fork":
        ACTIVITY.limits = FaultOptions()
        with protection.protected(Path("/missing"), ACTIVITY.limits):
            pid = os.fork()
            if not pid:
                sys.exit(3)  # it leaves the contexts of its parent
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            time.sleep(1.2)
            kill("SIGTERM")
            time.sleep(20)
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

def script():
    with protection.protected(Path("/missing"), ACTIVITY.limits):
        try:
            kill("SIGTERM")
            time.sleep(20)
        finally:
            print("finally", flush=True)

protection.launchers = lambda: [7]
protection.state_of = lambda pid: "running"
script() if sys.argv[1] == "script" else sys.exit(guarded(main))
"""


@pytest.fixture(scope="module")
def programs(request: pytest.FixtureRequest) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """The processes of all selected tests, which run at the same time, because they mostly wait."""
    tests = [item for item in request.session.items if item.name.startswith("test_signals[")]
    kinds = [item.callspec.params["kind"] for item in tests if isinstance(item, pytest.Function)]

    def started(kind: str) -> subprocess.Popen[str]:
        def ready() -> None:  # the shell that runs the tests may ignore some
            for each in (signal.SIGINT, signal.SIGHUP):
                signal.signal(each, signal.SIG_IGN if kind == "ignored" else signal.SIG_DFL)

        command = [sys.executable, "-c", PROGRAM, kind]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, cwd=ROOT, preexec_fn=ready, **pipes)

    running = {kind: started(kind) for kind in kinds}
    yield running
    for process in running.values():
        process.kill()
        process.communicate()


BUG = (
    "error: ZeroDivisionError: integer division or modulo by zero (this is a bug; please report it with the traceback)"
)
LOADING = "in phase start; no training step was in progress"
SAVING = "saving a checkpoint at the next safe point, then stopping"


@pytest.mark.parametrize(
    ("kind", "code", "out", "err"),
    [
        ("loading", 85, "", f"preempted by SIGTERM {LOADING}\n"),
        ("deferred", 0, "SIGUSR1\n", f"SIGUSR1: {SAVING}\n"),
        ("script", 85, "finally\n", ""),
        ("files", 85, "", f"preempted by SIGTERM {LOADING}\n"),
        ("bug", 1, "", f"{BUG}\n"),
        ("fork", 85, "3\n", f"preempted by SIGTERM {LOADING}\n"),
        ("worker", 0, f"{signal.SIGTERM.value} None\n", ""),
        ("ignored", 0, "own handler\nsurvived\n", ""),  # as with `nohup`, or in the background of a script
        ("launcher", 85, "", f"preempted by SIGTERM (the launcher (process 7) has exited) {LOADING}\n"),
        ("twice", 130, "still here\n", f"SIGINT: {SAVING}; press Ctrl-C again to exit immediately\n"
         "stopped immediately by SIGINT in phase start after step 0\n"),
    ],
)  # fmt: skip
def test_signals(programs: dict[str, subprocess.Popen[str]], kind: str, code: int, out: str, err: str) -> None:
    stdout, stderr = programs[kind].communicate(timeout=60)
    assert (programs[kind].returncode, stdout) == (code, out)
    assert stderr == err or (kind == "bug" and stderr.endswith(err))
