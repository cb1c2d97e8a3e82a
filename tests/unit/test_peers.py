"""One rank's view of the others: a store in memory, a clock that the tests advance, and heartbeats of absent ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_store import Store

from alignment.config.options_faults import FaultOptions
from alignment.run import peers
from alignment.run.activity import Activity
from alignment.run.ending import Ending
from alignment.run.peers import Peers
from alignment.run.processes import Process
from alignment.run.requests import REQUESTS
from alignment.run.stop import StopReason

SILENCE, LIMIT = 25.0, 600.0


class Ended(Exception):
    """Raised instead of exiting."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.line)
        self.ending = ending


class Lost(Store):
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


class World:
    """The ranks of one job, without threads: one under test, the others only as heartbeats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 3) -> None:
        self.store, self.size, self.activity = Store(), size, Activity()
        self.activity.limits = FaultOptions(hang_timeout=LIMIT, hang_timeout_first=LIMIT, peer_timeout=SILENCE)
        monkeypatch.setattr(peers, "ACTIVITY", self.activity)

    def rank(self, number: int, **more: Any) -> Peers:
        made = Peers(self.store, number, self.size, **more)
        made.end = self._end  # type: ignore[method-assign, assignment]
        return made

    def _end(self, ending: Ending, **_: Any) -> None:
        raise Ended(ending)

    def beat(self, *ranks: int, **values: Any) -> None:
        """Write heartbeats of other ranks."""
        for rank in ranks:
            beat = {"host": f"n{rank}", "machine": "elsewhere", "pid": 7, "start": "1", "phase": "train", "step": 3}
            beat |= {"count": self.activity.now, "idle": 0.0, "progress": 1, "limit": LIMIT, "asked": 0, "detail": ""}
            beat |= {"left": None, **values}
            self.store.set(f"beat/{rank}", json.dumps(beat))

    def spend(self, seconds: float, rank: Peers, *beating: int, **values: Any) -> None:
        end = self.activity.now + seconds
        while self.activity.now < end:
            self.activity.now += 0.5
            self.beat(*beating, **values)
            rank._turn()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield World(monkeypatch)
    REQUESTS.forget()


def here(**more: Any) -> dict[str, Any]:
    """Values of a heartbeat from a process of this machine, by default this one."""
    return {"machine": peers.machine(), **Process.of(os.getpid())._asdict(), **more}


def test_a_silent_rank_of_another_machine_ends_the_job(world: World) -> None:
    rank = world.rank(0)
    world.spend(1000, rank, 1)  # the first heartbeat of rank 2 may take as long as it likes
    world.spend(5, rank, 1, 2)
    world.spend(SILENCE, rank, 1)
    with pytest.raises(Ended, match=r"rank 2 \(host n2, .* in phase train, step 3: .* for 26 s") as ended:
        world.spend(1, rank, 1)
    assert ended.value.ending.stacks and "interpreter lock" in str(ended.value), "both causes are named"


def test_a_rank_listens_to_rank_0_only(world: World) -> None:
    rank = world.rank(1)
    world.spend(40, rank, 0)
    with pytest.raises(Ended, match="rank 0"):
        world.spend(SILENCE + 1, rank, 2)


def test_an_interpreter_lock_has_the_limit_of_a_hang(world: World) -> None:
    """Its process runs on this machine, but none of its threads do."""
    rank = world.rank(0)
    world.spend(5, rank, 1, 2, **here())
    world.spend(LIMIT - 1, rank, 1, **here())
    with pytest.raises(Ended, match=r"rank 2 .*holds Python's interpreter lock"):
        world.spend(3, rank, 1, **here())


@pytest.mark.parametrize(("number", "seconds", "says"), [
    (signal.SIGSTOP, SILENCE, "the process is suspended"), (signal.SIGKILL, 0, "in phase train, step 3 was killed"),
])  # fmt: skip
def test_a_process_of_this_machine_is_looked_up(number: int, seconds: float, says: str, world: World) -> None:
    rank = world.rank(0)
    with subprocess.Popen(["sleep", "60"]) as child:
        place = here(**Process.of(child.pid)._asdict())
        world.spend(5, rank, 1, **place)
        world.beat(2)
        os.kill(child.pid, number)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        world.spend(seconds, rank, 2)
        with pytest.raises(Ended, match=f"rank 1 .*{says}"):
            world.spend(1, rank, 2)
        child.kill()


def test_what_a_rank_has_published_before_its_end_counts(world: World) -> None:
    """It has finished, or failed with a reason of its own."""
    failure = Ending("error: its own", 85, "preempted", "SIGTERM")
    rank = world.rank(0)
    world.spend(5, rank, 1, 2, **here())
    gone = here(start="0")
    world.spend(100, rank, 2, **gone, left="finished")
    with pytest.raises(Ended) as ended:
        world.spend(1, rank, 1, **gone, left=dataclasses.asdict(failure))
    assert ended.value.ending == failure


def test_a_rank_that_fails_alone_ends_the_others_later(world: World) -> None:
    """In a script, whose ranks usually fail together."""
    rank = world.rank(0)
    failure = {"line": "error: its own", "code": 1}
    world.spend(5, rank, 1, 2)
    world.beat(1, left=failure)
    world.spend(SILENCE, rank, 2)
    with pytest.raises(Ended, match="its own"):
        world.spend(1, rank, 2)


@pytest.mark.parametrize(("number", "by_launcher"), [(0, False), (1, False), (1, True)])
def test_a_silent_store_ends_the_rank(number: int, by_launcher: bool, world: World) -> None:
    """The heartbeat thread is blocked; another one calls this."""
    rank = world.rank(number, by_launcher=by_launcher)
    world.spend(2, rank, *({0, 1, 2} - {number}))
    world.activity.now += SILENCE
    rank.check_store()
    world.activity.now += 1
    what = "the launcher" if by_launcher else "rank 0"
    with pytest.raises(Ended, match=rf"rank {number} \(host .*\) in phase start, step 0: {what}"):
        rank.check_store()


@pytest.mark.parametrize(("left", "says"), [(None, "rank 0 .*phase train, step 3 was killed"), ("finished", "")])
def test_a_lost_store_is_a_killed_rank_0_unless_it_has_left(left: str | None, says: str, world: World) -> None:
    rank = world.rank(1)
    world.spend(1, rank, 0, left=left)
    rank._store = Lost()
    with pytest.raises(Ended, match=says) if says else contextlib.nullcontext():
        rank._turn()


def test_a_lost_launcher_is_a_request_to_stop(world: World) -> None:
    rank = world.rank(1, by_launcher=True)
    world.spend(1, rank, 0)
    rank._store = Lost()
    rank._turn()
    assert rank.over.is_set() and "SIGTERM (the launcher" in str(REQUESTS)
    world.activity.now += 100
    rank.check_store()


def test_stop_requests_are_forwarded_with_their_origin(world: World) -> None:
    ranks = [world.rank(number) for number in range(3)]
    for rank in ranks:
        rank._turn()
    for reason in (StopReason.SIGTERM, StopReason.SIGINT):
        REQUESTS.request(reason)
        ranks[2]._publish()
        REQUESTS.forget()
        ranks[0]._turn()
        assert str(REQUESTS) == f"{reason.name} (received by rank 2)"
        ranks[0]._publish()
        REQUESTS.forget()
        ranks[1]._turn()
        assert str(REQUESTS) == f"{reason.name} (received by rank 2)"


def test_progress_and_limit_are_those_of_all_ranks(world: World) -> None:
    """Rank 0 counts for the others, and leaves out who has finished."""
    first, second = world.rank(0), world.rank(1)
    world.beat(2, progress=5, limit=900.0)
    for rank in (second, first, first, second):
        rank._turn()
    assert second.limit == first.limit == 900
    before = second.progress
    world.beat(2, progress=6, limit=900.0, left="finished", count=1)
    for rank in (first, first, second):
        rank._turn()
    assert second.progress > before and first.limit == second.limit == LIMIT
    first._left = "finished"
    first._turn()
    assert "rank 1 " in first.places and "rank 2" not in first.places


def test_a_rank_makes_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number does not grow with that of the ranks, except on rank 0."""
    world = World(monkeypatch, size=40)
    ranks = [world.rank(number) for number in range(40)]
    for rank in ranks:
        rank._turn()
    before = world.store.asked
    ranks[1]._turn()
    assert world.store.asked - before <= 3 and list(ranks[1]._beats) == [0]
    ranks[0]._turn()
    assert sorted(ranks[0]._beats) == list(range(1, 40))


# The end of this rank ------------------------------------------------------------------------------------------------


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Ending, bool]]:
    """The exits of ranks with their endings, and whether the rank reports it."""
    made: list[tuple[Ending, bool]] = []

    def end_with(ending: Ending, *, speaks: bool = True, last: Any = None) -> None:
        made.append((ending, speaks))
        raise Ended(ending)

    monkeypatch.setattr(peers, "end_with", end_with)
    return made


def test_the_first_rank_reports_and_the_others_follow(exits: list[tuple[Ending, bool]]) -> None:
    store = Store()
    ranks = [Peers(store, number, 3) for number in range(3)]
    ending = Ending("error: rank 1: no", 130, "stopped", "SIGINT")
    for call in (lambda: ranks[1].end(ending), lambda: ranks[0].end(Ending("late")), ranks[2]._turn):
        with pytest.raises(Ended):
            call()
    assert exits == [(ending, True), (ending, False), (ending, False)]


def test_without_a_store_each_rank_reports(exits: list[tuple[Ending, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_ASK_S", 0.1)
    store = Store()
    monkeypatch.setattr(store, "add", lambda *_: time.sleep(5))
    rank = Peers(store, 1, 2)
    with pytest.raises(Ended):
        rank.end(Ending("error: its own"))
    assert exits == [(Ending("error: its own"), True)]


def test_suspended_ranks_are_killed_and_rank_0_is_recorded(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They notice nothing, and nobody else writes the status."""
    recorded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(peers, "fail_in_place_of", lambda *place: recorded.append(place))
    world.activity.folder = tmp_path
    rank = world.rank(1)
    with subprocess.Popen(["sleep", "60"]) as child:
        world.spend(1, rank, 0, **here(**Process.of(child.pid)._asdict()))
        rank._end_others(Ending("error: it failed"))
        assert child.poll() is None and not recorded
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        rank._end_others(Ending("error: it failed"))
        assert child.wait(10) == -signal.SIGKILL and recorded == [(tmp_path, "n0", child.pid, "it failed")]


def test_ranks_leave_when_all_have_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_POLL_S", 0.02)
    store = Store()
    ranks = [Peers(store, number, 2) for number in range(2)]
    for rank in ranks:
        rank.start()
    store.add("finished", 1)
    ranks[1].leave()
    assert json.loads(store.get("beat/1"))["left"] == "finished" and not ranks[1].is_alive()
    ranks[0].leave(Ending("error: its own", 85))
    assert json.loads(store.get("beat/0"))["left"]["code"] == 85 and not ranks[0].is_alive()
