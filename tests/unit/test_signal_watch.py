"""The signal thread, step by step; and the points at which ranks exchange stop requests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from alignment.run import signals
from alignment.run.processes import Process
from alignment.run.requests import REQUESTS, StopRequests
from alignment.run.signals import SignalWatch
from alignment.run.stop import Cut, RunStopped, StopReason
from alignment.training import safe_points
from alignment.training.safe_points import SafePoint


class Hearing:
    """A watch without its thread, and a record of its actions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.ends: list[int] = []
        self.told: list[str] = []
        monkeypatch.setattr(signals, "monotonic", lambda: self.now)
        monkeypatch.setattr(signals, "write_beside_bars", self.told.append)
        self.watch = SignalWatch(lambda: self.ends.append(1))
        self.watch._taken = {signal.SIGTERM, signal.SIGINT}


@pytest.fixture
def hearing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hearing]:
    made = Hearing(monkeypatch)
    before = {each: signal.getsignal(each) for each in made.watch._taken}
    for each in before:
        signal.signal(each, made.watch._handle)
    yield made
    REQUESTS.forget()
    REQUESTS.deferring = False
    for each, handler in before.items():
        signal.signal(each, handler)


def test_a_handler_that_was_set_later_takes_precedence(hearing: Hearing) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)
    hearing.watch._hear(signal.SIGTERM)
    assert REQUESTS.reason is None


@pytest.mark.parametrize(("after", "ends"), [(1.9, []), (2.0, [1])])
@pytest.mark.parametrize("done", [False, True])
def test_a_second_ctrl_c_counts_after_two_seconds(after: float, ends: list[int], done: bool, hearing: Hearing) -> None:
    """Launchers repeat the first one. It also applies while the run finishes."""
    REQUESTS.deferring, REQUESTS.done = True, done
    hearing.watch._hear(signal.SIGINT)
    hearing.now += after
    hearing.watch._hear(signal.SIGINT)
    assert hearing.ends == ends


def test_a_request_on_another_rank_is_announced_once(hearing: Hearing) -> None:
    with REQUESTS.deferred(None):
        REQUESTS.request(StopReason.SIGUSR1, "received by rank 3")
        for _ in range(3):
            hearing.watch._announce()
    assert hearing.told == ["SIGUSR1 (received by rank 3): saving a checkpoint at the next safe point, then stopping"]


def test_an_interrupt_is_that_of_this_rank_only(hearing: Hearing) -> None:
    REQUESTS.request(StopReason.SIGHUP, "the reason")
    with pytest.raises(RunStopped, match=r"by SIGHUP \(the reason\) in phase start") as stopped:
        hearing.watch._handle(signal.SIGTERM, None)
    assert stopped.value.everywhere is False
    hearing.watch._handle(signal.SIGTERM, None)  # once is enough


@pytest.mark.parametrize(("done", "told"), [(False, 1), (True, 0)])
def test_a_lost_launcher_is_a_request(done: bool, told: int, hearing: Hearing) -> None:
    REQUESTS.deferring, REQUESTS.done = True, done
    hearing.watch._lose(Process(7, "1"), "torchrun")
    hearing.watch._announce()
    assert REQUESTS.reason is (None if done else StopReason.SIGTERM) and len(hearing.told) == told
    assert not told or "the launcher torchrun (process 7) has exited" in hearing.told[0]


# Safe points ---------------------------------------------------------------------------------------------------------


class Asking(StopRequests):
    """Counts a process's checks for requests, by its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.at: list[float] = []

    def asked(self, every: float = 1.0) -> StopReason | None:
        self.at.append(self.now)
        return super().asked(every)


def windows(point: SafePoint, requests: Asking, number: int, calls: int, seconds: float) -> None:
    for _ in range(number):
        point.restart()
        for _ in range(calls):
            point()
            requests.now += seconds


def test_ranks_check_more_often_when_micro_batches_become_slow() -> None:
    """Only the launch of the first one was timed."""
    requests = Asking()
    point = SafePoint(requests, lambda: requests.now)
    with requests.deferred(None):
        windows(point, requests, 1, 3, 0.01)
        requests.at.clear()
        windows(point, requests, 2, 64, 2.0)
    gaps = [after - before for before, after in zip(requests.at, requests.at[1:])]
    assert len(requests.at) > 100 and max(gaps[2:]) <= 4.0


def test_ranks_check_about_every_two_seconds() -> None:
    requests = Asking()
    point = SafePoint(requests, lambda: requests.now)
    with requests.deferred(None):
        windows(point, requests, 1000, 11, 0.01)
        assert 50 < len(requests.at) < 80, "100 s"
        requests.request(StopReason.STOP)
        with pytest.raises(Cut):
            windows(point, requests, 30, 11, 0.01)


def test_ranks_follow_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Asking()

    def slowest(values: list[float]) -> list[float]:
        return [values[0], max(values[1], 1.0)]  # the other rank takes a second per call

    monkeypatch.setattr(safe_points, "world_size", lambda: 2)
    monkeypatch.setattr(safe_points, "largest_numbers", slowest)
    point = SafePoint(requests, lambda: requests.now)
    with requests.deferred(None):
        windows(point, requests, 1, 101, 0.001)
    assert 45 <= len(requests.at) <= 55, "after every second one"
