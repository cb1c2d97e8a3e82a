"""One rank's view of the others: a store in memory, a clock that the tests advance, and heartbeats of absent ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_store import Store

from alignment.config.options_training import FaultOptions
from alignment.run import peers
from alignment.run.activity import Activity
from alignment.run.ending import Ending
from alignment.run.peers import Peers
from alignment.run.stop import REQUESTS, StopReason

SILENCE, LIMIT = 25.0, 600.0


class World:
    """The ranks of one job, without threads: one under test, the others only as heartbeats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 3) -> None:
        self.store, self.size, self.activity = Store(), size, Activity()
        self.activity.limits = FaultOptions(hang_timeout=LIMIT, hang_timeout_first=LIMIT, peer_timeout=SILENCE)
        self.exits: list[tuple[Ending, bool]] = []  # and whether the rank reports it
        monkeypatch.setattr(peers, "ACTIVITY", self.activity)
        monkeypatch.setattr(peers, "_POLL_S", 0.02)
        monkeypatch.setattr(peers, "end_with", lambda ending, speaks, last: self.exits.append((ending, speaks)))

    def rank(self, number: int) -> Peers:
        return Peers(self.store, number, self.size)

    def beat(self, *ranks: int, **values: Any) -> None:
        """Write heartbeats of other ranks."""
        for rank in ranks:
            beat = {"rank": rank, "host": f"n{rank}", "machine": "elsewhere", "pid": 7, "phase": "train", "step": 3}
            beat |= {"now": self.activity.now, "idle": 0.0, "limit": LIMIT, "asked": 0, "detail": ""}
            self.store.set(f"beat/{rank}", json.dumps(beat | values))

    def spend(self, seconds: float, rank: Peers, *beating: int, **values: Any) -> str:
        """Let time pass until there is a verdict; return its line, or nothing."""
        end = self.activity.now + seconds
        while self.activity.now < end:
            self.activity.now += 0.5
            self.beat(*beating, **values)
            rank._turn()
            if verdict := rank.verdict():
                return verdict.line
        return ""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    yield World(monkeypatch)
    REQUESTS.forget()


def here(pid: int = os.getpid()) -> dict[str, Any]:
    """Values of a heartbeat from a process of this machine, by default this one."""
    return {"machine": Peers(None, 0, 2)._own["machine"], "pid": pid}


def test_a_silent_rank_of_another_machine_ends_the_job(world: World) -> None:
    rank = world.rank(0)
    assert not world.spend(1000, rank, 1), "the first heartbeat of rank 2 may take as long as it likes"
    assert not world.spend(5, rank, 1, 2) + world.spend(SILENCE, rank, 1)
    line = world.spend(1, rank, 1)
    assert "rank 2 (host n2, process 7) in phase train, step 3: no heartbeat for 26 s" in line
    assert "interpreter lock" in line and "network" in line, "both causes are named"


def test_a_rank_listens_to_rank_0_only(world: World) -> None:
    rank = world.rank(1)
    assert not world.spend(40, rank, 0)
    assert "rank 0" in world.spend(SILENCE + 1, rank, 2)


def test_an_interpreter_lock_has_the_limit_of_a_hang(world: World) -> None:
    """Its process runs on this machine, but none of its threads do."""
    rank = world.rank(0)
    assert not world.spend(5, rank, 1, 2, **here()) + world.spend(LIMIT - 1, rank, 1, **here())
    assert "rank 2 " in (line := world.spend(3, rank, 1, **here())) and "holds Python's interpreter lock" in line


@pytest.mark.parametrize(("number", "seconds", "says"), [
    (signal.SIGSTOP, SILENCE, "the process is suspended"), (signal.SIGKILL, 0, "in phase train, step 3 was killed"),
])  # fmt: skip
def test_a_process_of_this_machine_is_looked_up(number: int, seconds: float, says: str, world: World) -> None:
    rank = world.rank(0)
    with subprocess.Popen(["sleep", "60"]) as child:
        assert not world.spend(5, rank, 1, **here(child.pid))
        world.beat(2)
        os.kill(child.pid, number)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        assert not world.spend(seconds, rank, 2)
        assert "rank 1 " in (line := world.spend(1, rank, 2)) and says in line
        rank._end_others(Ending("it failed"))
        assert child.wait(10) == -signal.SIGKILL, "a suspended rank notices nothing, so it is killed"
    rank._gone, rank._beats[1]["heard"] = set(), -1000.0
    assert "no heartbeat" in str(rank.verdict()), "the store may hang after it has ended"


def test_an_announced_end_counts_before_that_of_its_process(world: World) -> None:
    """Immediately, or in a script, whose ranks usually fail together, later."""
    rank = world.rank(0)
    for grace in (0.0, SILENCE):
        world.store.values.clear()
        rank._announced = None
        world.spend(5, rank, 1, 2)
        world.store.set("end", json.dumps({"line": "error: its own", "grace": grace}))
        assert world.spend(SILENCE - 1, rank, 1, 2) == ("" if grace else "error: its own")
    assert world.spend(2, rank, 1, 2) == "error: its own"
    rank._gone = {1}
    rank.end(Ending("error: rank 1 was killed"))
    assert world.exits[0][0].line == "error: its own"


@pytest.mark.parametrize("number", [0, 1])
def test_a_silent_store_ends_the_rank(number: int, world: World) -> None:
    """The heartbeat thread is blocked; another one asks for the verdict."""
    rank = world.rank(number)
    rank._turn()
    world.activity.now += SILENCE
    assert rank.verdict() is None
    world.activity.now += 1
    verdict = rank.verdict()
    assert verdict is not None and f"rank {number} on host" in verdict.line and "store" in verdict.line


@pytest.mark.parametrize("by_launcher", [False, True])
def test_a_lost_store_is_a_killed_rank_0_or_a_lost_launcher(
    by_launcher: bool, world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded: list[tuple[Any, ...]] = []
    monkeypatch.setattr(peers, "fail_in_place_of", lambda *place: recorded.append(place))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(by_launcher))
    world.activity.folder = tmp_path
    rank = world.rank(1)
    world.spend(1, rank, 0)
    monkeypatch.setattr(world.store, "check", lose)
    rank.run()
    verdict = rank.verdict()
    if by_launcher:
        assert verdict is None and REQUESTS.reason is StopReason.SIGTERM
    else:
        assert verdict is not None and "rank 0 (host n0, process 7) in phase train, step 3 was killed" in verdict.line
        rank._end_others(verdict)
        assert recorded == [(tmp_path, "n0", 7, verdict.line.removeprefix("error: "))]


def test_a_rank_that_has_finished_is_not_judged(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end as soon as all have finished; the store may end with rank 0."""
    for number, other in ((0, 1), (1, 0)):
        rank = world.rank(number)
        world.spend(5, rank, 1, 2, 0)
        world.beat(other, limit=0, **here(2**22 + 1))  # there is no such process
        rank._turn(), rank._turn()
        assert not world.spend(SILENCE + 5, rank, 2, *([1] if number else []))
    monkeypatch.setattr(rank, "_turn", lose)
    rank.run()
    assert rank._over.is_set() and rank.verdict() is None
    first = world.rank(0)
    world.spend(5, first, 1, 2)
    monkeypatch.setattr(first, "_turn", lose)
    first.run()
    assert "rank 0 was killed or disconnected" in str(first.verdict()), "it has lost its own store"


def lose(*_: Any) -> None:
    raise RuntimeError("Connection reset by peer")


def test_an_error_that_may_pass_does_not_end_the_thread(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, turns = world.rank(1), list[int]()

    def turn() -> None:
        turns.append(1)
        if len(turns) == 3:
            rank._over.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(rank, "_turn", turn)
    rank.run()
    assert len(turns) == 3 and rank.verdict() is None


def test_stop_requests_are_forwarded_with_their_origin(world: World) -> None:
    first, second, third = (world.rank(number) for number in range(3))
    REQUESTS.request(StopReason.SIGTERM)
    third._turn()
    REQUESTS.forget()
    first._turn(), first._turn()
    REQUESTS.forget()
    second._turn()
    assert str(REQUESTS) == "SIGTERM (received by rank 2)"


def test_rank_0_knows_progress_and_limit_of_all_ranks(world: World) -> None:
    """Except for who has finished."""
    rank = world.rank(0)
    rank._turn()
    world.activity.now = 7.0
    world.beat(1, idle=5.0)
    world.beat(2, limit=900.0, idle=9.0)
    rank._turn()
    idle, limit, where = rank.progress()
    assert (idle, limit) == (5, 900) and where.startswith("rank 2 ") and "rank 0 " in where
    world.beat(2, limit=0, idle=0.0)
    rank._turn()
    idle, limit, where = rank.progress()
    assert (idle, limit) == (5, LIMIT) and "rank 2" not in where


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


def test_the_first_end_counts_and_one_rank_reports_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Ending("error: rank 1: no", 130, "SIGINT")
    world.rank(1).end(ending)
    world.rank(0).end(Ending("late"))
    assert world.exits == [(ending, True), (ending, False)]
    monkeypatch.setattr(peers, "_ASK_S", 0.1)
    for name in ("add", "compare_set"):
        monkeypatch.setattr(world.store, name, lambda *_: time.sleep(5))
    world.rank(2).end(Ending("error: its own"))
    assert world.exits[2] == (Ending("error: its own"), True), "without a store, each rank reports"


def test_a_broken_connection_waits_for_its_cause(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, the line names the ranks that are silent."""
    monkeypatch.setattr(peers, "_LOST_S", 0.5)
    rank = world.rank(0)
    assert not world.spend(5, rank, 1, 2) + world.spend(3, rank, 1)
    begun = time.monotonic()
    rank._announce(Ending("error: connection closed", lost=True))
    assert time.monotonic() - begun >= 0.5
    assert re.search("closed; silent: rank 2 .* step 3$", json.loads(world.store.get("end"))["line"])
    world.store.set("end", json.dumps({"line": "error: the cause"}))
    rank.end(Ending("error: connection closed", lost=True))
    assert world.exits[0][0].line == "error: the cause"


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_ranks_leave_when_all_have_finished(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.size = 2
    ranks = [world.rank(number) for number in range(2)]
    for rank in ranks:
        rank.start()
    threads = [peers.threading.Thread(target=rank.leave) for rank in ranks]
    threads[0].start()
    threads[0].join(0.3)
    assert threads[0].is_alive() and ranks[0].is_alive(), "it still watches the other"
    threads[1].start()
    for thread in threads:
        thread.join(5)
    assert not any(each.is_alive() for each in (*ranks, *threads)) and world.store.values["left"] == "2"
    world.store.values.clear()
    interrupted = world.rank(0)
    interrupted.start()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(peers, "bounded", interrupt)
        interrupted.leave()
    assert not interrupted.is_alive()
    failing = world.rank(1)
    failing.start()
    failing.leave(Ending("error: its own", 85))
    assert Ending(**json.loads(world.store.get("end"))) == Ending("error: its own", 85, grace=SILENCE)
