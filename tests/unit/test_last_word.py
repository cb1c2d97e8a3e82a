"""The reason for the end of a job is reported and every process exits, whatever hangs or fails meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT
from fake_store import Ended, Store, ended

from alignment.run import ending, guard, last_word
from alignment.run.activity import Activity, Limits
from alignment.run.last_word import LastWord, Verdict


@pytest.fixture(autouse=True)
def one_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An exit that a test survives, and short time limits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(last_word, "mute", lambda: None)
    monkeypatch.setattr(last_word, "end_process", ended)
    monkeypatch.setattr(last_word, "end_within", lambda seconds, code: None)
    monkeypatch.setattr(last_word, "_HUSH_S", 0.5)
    for module in (last_word, ending):
        monkeypatch.setattr(module, "WRITE_S", 0.2)


def hang(*_: Any, **__: Any) -> None:
    time.sleep(20)


@pytest.mark.ci
def test_a_hanging_disk_and_a_dead_rank_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "hang-0.txt")  # without a reader, open() does not return
    activity = SimpleNamespace(folder=tmp_path, status=SimpleNamespace(update=hang))
    monkeypatch.setattr(last_word, "ACTIVITY", activity)
    begun = time.monotonic()
    with pytest.raises(Ended) as end:
        LastWord(Store(), 0, hang).speak("error: rank 1 hangs", Verdict(hung=True), at_once=True)
    assert time.monotonic() - begun < 5 and end.value.code == 1
    assert capsys.readouterr().err == "\nerror: rank 1 hangs\n"


def test_a_hanging_terminal_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(write=hang, flush=hang)
    monkeypatch.setattr(sys, "stderr", stream)
    begun = time.monotonic()
    with pytest.raises(Ended):
        LastWord(None, 0).speak("error: it hangs", Verdict())
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("what", ["bars", "stderr", "living", "stacks"])
def test_errors_in_the_last_word_do_not_prevent_the_exit(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the right to report would stay claimed, and the next rank would wait forever."""

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Set changed size during iteration")

    def closed(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    said: list[str] = []
    stream = SimpleNamespace(write=closed if what == "stderr" else said.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", stream)
    if what == "bars":
        monkeypatch.setattr(ending, "open_bars", fail)
    if what == "stacks":
        monkeypatch.setattr(last_word, "write_stacks", fail)
    with pytest.raises(Ended) as end:
        LastWord(Store(), 0).speak("the line", Verdict(code=85, hung=True), fail if what == "living" else tuple)
    assert end.value.code == 85
    assert said == ([] if what == "stderr" else ["\nthe line\n"])


def test_a_following_rank_exits_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(last_word, "mute", fail)
    word = LastWord(Store(), 1)
    with pytest.raises(Ended):
        word.follow()


def test_the_first_rank_reports_and_the_others_exit_with_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, codes = Store(), []

    def second() -> None:
        while "claim" not in store.values:
            time.sleep(0.01)
        try:
            LastWord(store, 1).speak("error: no", Verdict())
        except Ended as end:
            codes.append(end.code)

    thread = threading.Thread(target=second)
    thread.start()
    with pytest.raises(Ended) as end:
        LastWord(store, 0).speak("stopped", Verdict(code=130, state="stopped"), lambda: [1])
    thread.join(10)
    assert codes == [130] and end.value.code == 130
    assert capsys.readouterr().err == "\nstopped\n"


@pytest.mark.parametrize("hung", [False, True])
def test_what_ranks_tell_each_other(hung: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reporting rank waits for silence, and rank 0, whose process may serve the store, until it was heard."""
    store, happened, slept = Store(), list[tuple[Any, ...]](), list[float]()
    monkeypatch.setattr(last_word, "time", SimpleNamespace(monotonic=time.monotonic, sleep=slept.append))
    monkeypatch.setattr(last_word, "record", lambda line, verdict: happened.append(("recorded", line, verdict.code)))
    monkeypatch.setattr(last_word, "write_stacks", lambda folder, rank: happened.append(("stacks", rank)))

    def bury(verdict: Verdict, line: str, speaks: bool) -> None:
        happened.append(("buried", verdict, line, speaks))

    verdict = Verdict(code=85, state="preempted", signal="SIGTERM", hung=hung, dead=(3,))
    store.values |= {"silent/2": "1", "heard": "1"}
    with pytest.raises(Ended) as end:
        LastWord(store, 0, bury).speak("the line", verdict, lambda: [2])
    assert end.value.code == 85 and store.values["said"] == "the line" and not slept
    assert happened == [("stacks", 0)] * hung + [("recorded", "the line", 85), ("buried", verdict, "the line", True)]
    happened.clear()
    del store.values["silent/2"]
    with pytest.raises(Ended) as end:
        LastWord(store, 2, bury).speak("another line", Verdict())
    assert end.value.code == 85 and store.values["silent/2"] == "1" and store.values["heard"] == "2" and slept == [1.0]
    assert happened == [("stacks", 2)] * hung + [("recorded", "the line", 85), ("buried", verdict, "the line", False)]


@pytest.mark.parametrize(("at_once", "pauses"), [(False, 1), (True, 0)])
def test_silence_is_waited_for_unless_there_is_no_time(
    at_once: bool, pauses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(99))
    slept: list[float] = []
    monkeypatch.setattr(last_word, "time", SimpleNamespace(monotonic=lambda: next(clock) / 4, sleep=slept.append))
    with pytest.raises(Ended):
        LastWord(Store(), 1).speak("the line", Verdict(), lambda: [2], **({"at_once": True} if at_once else {}))
    assert len(slept) == pauses


# The guard -----------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_hanging_single_process_exits_even_if_its_disk_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hang-0.txt")
    code = f"""
import sys, time
from pathlib import Path
from alignment.run.guard import guarded
from alignment.run.activity import ACTIVITY, Limits

def main():
    ACTIVITY.folder, ACTIVITY.limits = Path({str(tmp_path)!r}), Limits(least=0.5, first=0.5)
    time.sleep(30)

sys.exit(guarded(main))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=20)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this process (host ") and "has made no progress for" in done.stderr


def test_a_rank_that_continues_alone_is_monitored_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regardless of how long it was one of several."""
    now, said = [0.0], []
    activity = Activity(lambda: now[0])
    activity.limits = Limits(least=10, factor=5, first=10)
    monkeypatch.setattr(guard, "ACTIVITY", activity)
    monkeypatch.setattr(guard, "hung_line", lambda *_: "hung")
    monkeypatch.setattr(guard._Guard, "_end", lambda self, line, verdict: said.append((now[0], line, verdict.hung)))
    watch = guard._Guard()
    watch.peers = peers = SimpleNamespace(alone=False, tick=activity.tick)  # type: ignore[assignment]

    def spend(seconds: float, *, working: bool) -> None:
        end = now[0] + seconds
        while now[0] < end:
            now[0] += 0.5
            if working:
                activity.progress()
            watch._tick()

    spend(100, working=True)
    peers.alone = True
    spend(11, working=False)
    assert said == [(110.5, "hung", True), (111.0, "hung", True)]


def test_the_exit_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[tuple[float, int]] = []
    monkeypatch.setattr(guard, "end_within", lambda seconds, code: bounds.append((seconds, code)))
    monkeypatch.setattr(guard, "ignore_stop_signals", lambda: None)
    watch = guard._Guard()
    watch.peers = SimpleNamespace(finish=lambda: None)  # type: ignore[assignment]
    try:
        watch._finish(85)
    finally:
        guard.REQUESTS.forget()
    assert bounds == [(30.0, 85)]


def test_a_process_that_does_not_exit_is_killed_with_its_compilers(tmp_path: Path) -> None:
    (tmp_path / "ninja").symlink_to("/bin/sleep")
    code = """
import subprocess, sys, time
from alignment.run.ending import end_within
print(subprocess.Popen([sys.argv[1], "60"]).pid, flush=True)
end_within(0.2, 7)
time.sleep(30)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "ninja")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        compiler = int(process.stdout.readline())
        assert process.wait(15) == 7
    deadline = time.monotonic() + 5
    while _lives(compiler) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(compiler)


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except OSError:
        return False


@pytest.mark.parametrize(("verdict", "drawn"), [
    (Verdict(), True), (Verdict(code=0, state="finished"), False), (Verdict(hung=True), False),
    (Verdict(code=85, state="preempted", signal="SIGTERM"), False),
])  # fmt: skip
def test_the_report_of_a_failure_follows_its_status(
    verdict: Verdict, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stops or finishes has drawn it before; one that hangs or is killed has no time for it."""
    activity, happened = Activity(), list[str]()
    activity.status = SimpleNamespace(update=lambda **values: happened.append(values["state"]))  # type: ignore[assignment]

    def draw() -> None:
        time.sleep(0.1)  # it is waited for
        happened.append("report")

    activity.at_failure = draw
    monkeypatch.setattr(last_word, "ACTIVITY", activity)
    last_word.record("error: it failed", verdict)
    assert happened == [verdict.state, *(["report"] if drawn else [])]
