"""One rank's view of the others' heartbeats: a store in memory, and a clock that the tests advance."""

from __future__ import annotations

import fcntl
import functools
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fake_store import Store

from alignment.run import beats, neighbors, peers
from alignment.run.activity import Activity, Limits
from alignment.run.beats import Beat, Heard, Pulse, hung_rank
from alignment.run.exchange import Exchange
from alignment.run.last_word import Verdict
from alignment.run.neighbors import Neighbors
from alignment.run.peers import Peers
from alignment.run.processes import Watched
from alignment.run.requests import StopRequests
from alignment.run.stop import StopReason


class Failed(SystemExit):
    """Raised instead of exiting, with the rank's line and verdict, and whether it reports if there is no store."""

    def __init__(self, line: str, verdict: Verdict, speaks: bool | None) -> None:
        super().__init__(verdict.code)
        self.line, self.verdict, self.speaks = line, verdict, speaks


class World:
    """Some ranks of one job, without threads."""

    def __init__(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.store, self.size = 100.0, Store(), size
        self.activity = Activity(lambda: self.now)
        monkeypatch.setattr(peers, "ACTIVITY", self.activity)
        self.absent = {rank: Pulse(rank) for rank in range(size)}

    def rank(self, number: int, **more: Any) -> Peers:
        made = Peers(self.store, number, self.size, clock=lambda: self.now, **more)
        made._last_word.speak = self._speak  # type: ignore[method-assign, assignment]
        return made

    def _speak(self, line: str, verdict: Verdict, *_: Any, speaks: bool | None = None, **__: Any) -> None:
        raise Failed(line, verdict, speaks)

    def beat(self, *ranks: int, machine: str = "elsewhere") -> None:
        """The activity of other ranks in the meantime."""
        for rank in ranks:
            self.absent[rank].machine = machine
            self.store.set(f"beat/{rank}", self.absent[rank].beat().text())

    def spend(self, seconds: float, each: Callable[[], None]) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            each()


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "_watch", lambda self: None)


def fallen(rank: Peers, *gone: int) -> None:
    """Processes of this machine that a rank considers ended; all ranks below 4 run here."""
    names = [other for other in range(min(4, rank.world_size)) if other != rank.rank]
    watched = {other: SimpleNamespace(ended=other in gone, kill=lambda: None, close=lambda: None) for other in names}
    rank._neighbors._watched = watched  # type: ignore[assignment]


@pytest.mark.usefixtures("no_thread")
def test_a_rank_without_a_first_heartbeat_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(3, monkeypatch)
    first = world.rank(0)

    def turn() -> None:
        world.beat(1)
        first._turn()

    world.spend(50, turn)
    with pytest.raises(Failed) as failed:
        world.spend(10, turn)
    assert failed.value.line.startswith("error: rank 2 has sent no heartbeat since the ranks joined: ")
    assert failed.value.verdict.dead == (2,) and world.now < 157


@pytest.mark.usefixtures("no_thread")
def test_all_silent_ranks_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second was suspended some seconds after the first, and would remain."""
    world = World(4, monkeypatch)
    first = world.rank(0)
    world.spend(5, lambda: (world.beat(1, 2, 3), first._turn()))  # type: ignore[func-returns-value]
    world.spend(15, lambda: (world.beat(2, 3), first._turn()))  # type: ignore[func-returns-value]
    with pytest.raises(Failed) as failed:
        world.spend(15, lambda: (world.beat(3), first._turn()))  # type: ignore[func-returns-value]
    assert "rank 1 (host " in failed.value.line and failed.value.verdict.dead == (1, 2)


@pytest.mark.usefixtures("no_thread")
def test_a_rank_that_is_cut_off_itself_kills_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    first = world.rank(0)
    world.spend(5, lambda: (world.beat(1), first._turn()))  # type: ignore[func-returns-value]
    world.now += 2.5
    world.activity.tick()
    world.now += 2.9
    with pytest.raises(Failed) as failed:
        first.fail("error: its own", Verdict())
    assert failed.value.verdict.dead == ()


@pytest.mark.usefixtures("no_thread")
def test_a_suspended_job_gets_one_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread notices it first."""
    for seen_by in ("_turn", "tick"):
        world = World(2, monkeypatch)
        first = world.rank(0)

        def both(world: World = world, first: Peers = first) -> None:
            world.beat(1)
            first._turn()
            first.tick()

        world.spend(5, both)
        world.now += 1000
        getattr(first, seen_by)()
        first.tick()
        first._turn()
        assert world.activity.idle <= 5.5
        with pytest.raises(Failed):
            world.spend(26, first._turn)  # silence is measured from now on
        assert world.now < 1000 + 105 + 27


@pytest.mark.usefixtures("no_thread")
def test_the_lost_rank_is_blamed_for_a_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one without a heartbeat for a second may be busy."""
    monkeypatch.setattr(peers, "_LOST_S", 0.5)
    world = World(6, monkeypatch)
    rank = world.rank(2)
    fallen(rank, 3)
    world.beat(0, 1, 2, 3, 4, 5)
    rank._exchange.met = True
    monkeypatch.setattr(peers.time, "sleep", lambda seconds: setattr(world, "now", world.now + seconds))
    with pytest.raises(Failed) as failed:
        rank.fail("error: a connection broke", Verdict(), lost=True)
    assert "rank 3 (host " in failed.value.line and "was killed in" in failed.value.line
    assert failed.value.verdict.dead == (3,)


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(("beats", "blamed"), [((0, 1, 3, 4), "rank 5"), ((0, 4, 5), ""), ((), "rank 4")])
def test_no_rank_is_killed_for_being_slow_after_a_broken_connection(
    beats: tuple[int, ...], blamed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(6, monkeypatch)
    rank = world.rank(2)
    fallen(rank)
    world.beat(0, 1, 2, 3, 4, 5)
    rank._exchange.met = True

    def sleep(seconds: float) -> None:
        world.now += seconds
        world.beat(*beats)

    monkeypatch.setattr(peers.time, "sleep", sleep)
    with pytest.raises(Failed) as failed:
        rank.fail("error: a connection broke", Verdict(), lost=True)
    line = failed.value.line
    assert failed.value.verdict.dead == ()
    assert f"{blamed} (host" in line if blamed else line == "error: a connection broke"


@pytest.mark.usefixtures("no_thread")
def test_the_store_is_kept_as_long_as_a_rank_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has left and ended does not count twice."""
    world = World(4, monkeypatch)
    first = world.rank(0)
    for rank in (1, 2):
        world.store.set(f"left/{rank}", "1")
    fallen(first, 1, 2)
    assert not first._all_left()
    world.store.set("left/3", "1")
    assert first._all_left()
    del world.store.values["left/3"]
    fallen(first, 3)
    assert first._all_left()


@pytest.mark.usefixtures("no_thread")
def test_a_store_suspended_at_the_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, monkeypatch)
    monkeypatch.setattr(peers, "ASK_S", 0.1)
    ranks = [world.rank(0), world.rank(1)]
    world.store.add("finished", 1)
    stop = threading.Event()
    monkeypatch.setattr(world.store, "set", lambda *_: stop.wait(10))
    begun = time.monotonic()
    ranks[1].finish()
    assert time.monotonic() - begun < 5
    stop.set()


def test_the_watch_survives_unexpected_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[int] = []

    def turn(self: Peers) -> None:
        turns.append(1)
        if len(turns) < 4:
            raise OSError(24, "Too many open files")
        self._own_end = True

    monkeypatch.setattr(Peers, "_turn", turn)
    monkeypatch.setattr(peers, "_POLL_S", 0.01)
    rank = Peers(Store(), 1, 2)
    rank._thread.join(10)
    assert len(turns) == 4
    assert capsys.readouterr().err == (
        "rank 1: monitoring the other ranks raised OSError: [Errno 24] Too many open files; monitoring continues\n"
    )


def test_neighbors_are_set_in_one_assignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be iterating over them."""
    here, seen = Neighbors(), []

    def begin(pid: int) -> Watched:
        seen.append(len(list(here)))
        return Watched(pid, None, None)

    monkeypatch.setattr(neighbors.Watched, "begin", begin)
    here.begin({1: 11, 2: 12})
    assert seen == [0, 0] and list(here) == [1, 2] and here.gone == [1, 2]
    here.close()
    assert 1 not in here


def test_a_process_is_watched_by_a_descriptor_of_any_number() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        with subprocess.Popen(["sleep", "60"]) as child:
            watched = Watched.begin(child.pid)
            if watched.descriptor is None:
                pytest.skip("a kernel without descriptors of processes")
            high = fcntl.fcntl(watched.descriptor, fcntl.F_DUPFD, 1500)
            os.close(watched.descriptor)
            watched.descriptor = high
            assert not watched.ended
            watched.kill()
            child.wait(10)
            assert watched.ended
            watched.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rank_makes_few_queries_until_all_have_joined() -> None:
    """Every rank used to query the first heartbeats of all ranks, twice a second."""
    store, size = Store(), 40
    exchanges = []
    for rank in range(size):
        call = lambda method, *arguments: getattr(store, method)(*arguments)  # noqa: E731
        exchanges.append(Exchange(call, rank, size, Pulse(rank), Heard(), Neighbors()))
    for _ in range(3):
        for exchange in exchanges[: size - 1]:
            exchange.turn()
    before = store.asked
    exchanges[1].turn()
    assert store.asked - before <= 3 and not exchanges[1].met
    exchanges[-1].turn()
    for exchange in exchanges:
        exchange.turn()
    assert all(exchange.met for exchange in exchanges)
    assert list(exchanges[7]._heard.beats) == [0] and sorted(exchanges[0]._heard.beats) == list(range(size))
    assert sorted(exchanges[7]._neighbors) == [rank for rank in range(size) if rank != 7]
    for exchange in exchanges:
        exchange._neighbors.close()


def test_a_heartbeat_survives_a_round_trip() -> None:
    beat = Pulse(3).beat()
    assert Beat.parsed(beat.text()) == beat and beat.asker == 3


class Lost(Store):
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(("finished", "waited", "killed"), [(0, 0.25, False), (0, 0.5, True), (2, 9.0, False)])
def test_the_end_of_a_process_of_this_machine(
    finished: int, waited: float, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last message may still arrive; once all ranks have finished, processes may end."""
    monkeypatch.setattr(peers, "_GRACE_S", 0.5)
    world = World(2, monkeypatch)
    first = world.rank(0)
    world.beat(0, 1)
    world.store.add("finished", finished)
    fallen(first, 1)
    first.tick()
    world.now += waited
    first._answered = world.now
    if not killed:
        first.tick()
        return
    with pytest.raises(Failed) as failed:
        first.tick()
    assert failed.value.line.startswith("error: rank 1 (host ") and failed.value.verdict == Verdict(dead=(1,))


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(("neighbors", "speaks"), [((), True), ((0, 3), True), ((1,), False), ((0, 1, 3), False)])
@pytest.mark.parametrize("way", ["silent", "lost"])
def test_without_the_store_of_rank_0_the_lowest_rank_of_a_machine_reports(
    way: str, neighbors: tuple[int, ...], speaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(4, monkeypatch)
    rank = world.rank(2)
    alive = SimpleNamespace(ended=False, kill=lambda: None, close=lambda: None)
    rank._neighbors._watched = dict.fromkeys(neighbors, alive)  # type: ignore[arg-type]
    if way == "lost":
        rank._store = Lost()
        turn = rank._turn
    else:
        world.spend(25, rank.tick)
        turn = functools.partial(world.spend, 0.5, rank.tick)
    with pytest.raises(Failed) as failed:
        turn()
    assert failed.value.verdict == Verdict(dead=(0,)) and failed.value.speaks is speaks


@pytest.mark.usefixtures("no_thread")
def test_a_rank_that_exits_ignores_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = World(2, monkeypatch).rank(1)
    rank._store, rank._own_end = Lost(), True
    calls = {"add": ("n", 1), "check": (["n"],), "set": ("n", "1"), "multi_get": (["n"],), "get": ("n",)}
    assert {name: rank._call(name, *values) for name, values in calls.items()} == {
        "add": 0, "check": False, "set": None, "multi_get": [], "get": None,
    }  # fmt: skip


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize("way", ["suspended", "exited", "silent"])
def test_a_rank_continues_without_the_store_of_a_launcher(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the launcher is just unreachable."""
    world, said = World(2, monkeypatch), list[str]()
    rank = world.rank(1, lost_store=said.append, launcher_stopped=lambda: way == "suspended")
    if way == "exited":
        rank._store = Lost()
        rank._turn()
    else:
        world.spend(25, rank.tick)
        assert not said and not rank.alone
        if way == "silent":
            with pytest.raises(Failed) as failed:
                world.spend(0.5, rank.tick)
            assert failed.value.verdict.dead == ()
            return
        world.spend(0.5, rank.tick)
    world.spend(60, rank.tick)
    assert rank.alone and len(said) == 1 and way in said[0]


@pytest.mark.usefixtures("no_thread")
def test_the_report_of_another_rank_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a turn, and while looking for the rank that was lost."""
    world, followed = World(2, monkeypatch), list[str]()
    rank = world.rank(1)

    def follow() -> None:
        followed.append("followed")
        raise Failed("", Verdict(), None)

    monkeypatch.setattr(peers.time, "sleep", lambda seconds: setattr(world, "now", world.now + seconds))
    rank._last_word.follow = follow  # type: ignore[method-assign, assignment]
    rank._turn()
    world.store.add("claim", 1)
    for meet in (rank._turn, lambda: rank.fail("error: a connection broke", Verdict(), lost=True)):
        with pytest.raises(Failed):
            meet()
    assert followed == ["followed"] * 2


@pytest.mark.usefixtures("no_thread")
@pytest.mark.parametrize(("speaks", "dead", "recorded"), [(True, (0, 2), 1), (False, (0, 2), 0), (True, (2,), 0)])
def test_the_dead_are_killed_and_the_failure_is_recorded_for_rank_0(
    speaks: bool, dead: tuple[int, ...], recorded: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    world, killed, written = World(3, monkeypatch), list[int](), list[tuple[Any, ...]]()
    world.activity.folder = tmp_path
    monkeypatch.setattr(peers, "fail_in_place_of", lambda *place: written.append(place))
    rank = world.rank(1)
    fallen(rank)
    for other, watched in rank._neighbors._watched.items():
        watched.kill = lambda other=other: killed.append(other)  # type: ignore[method-assign, misc]
    rank._last_word._bury(Verdict(dead=dead), "error: it failed", speaks)
    assert not written, "rank 0 is unknown"
    world.beat(0)
    rank._turn()
    killed.clear()
    rank._last_word._bury(Verdict(dead=dead), "error: it failed", speaks)
    assert killed == [*dead] and written == [(tmp_path, os.uname().nodename, os.getpid(), "it failed")] * recorded


def test_a_request_to_stop_names_the_rank_that_received_it() -> None:
    mine, theirs = (StopRequests(), StopRequests())
    here, there = Pulse(1, mine), Pulse(4, theirs)
    assert (here.beat().asked, here.beat().count) == (0, 2)
    theirs.request(StopReason.SIGTERM, "received")
    here.heed(there.beat())
    assert (here.beat().asked, here.beat().asker) == (int(StopReason.SIGTERM), 4)
    alone = Pulse(2, mine)
    assert (alone.beat().asked, alone.beat().asker) == (int(StopReason.SIGTERM), 2)


def test_a_heartbeat_tells_how_long_nothing_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    activity = Activity(lambda: now[0])
    activity.limits, activity.step = Limits(least=10, first=10), 7
    monkeypatch.setattr(beats, "ACTIVITY", activity)
    pulse = Pulse(3)
    for idle, over in ((10.0, False), (10.5, True)):
        now[0] = 50 + idle
        beat = pulse.beat()
        assert (beat.idle, beat.over, beat.phase, beat.step, beat.pid) == (idle, over, "start", 7, os.getpid())
        assert not beat.finished and not beat.waiting


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        ([], None),
        ([{}], 0),
        ([{}, {"over": False}], None),
        ([{}, {"over": False, "finished": True}], 0),
        ([{"waiting": True, "moves": 1}, {"moves": 9}], 1),
        ([{"moves": 9}, {"moves": 8}], 1),
        ([{"idle": 5.0}, {"idle": 6.0}, {"idle": 6.0}], 1),
        ([{"finished": True}, {"waiting": True}], 1),
    ],
)
def test_the_rank_that_blocks_the_others(ranks: list[dict[str, Any]], blamed: int | None) -> None:
    usual = {"moves": 5, "idle": 5.0, "over": True, "waiting": False, "finished": False}
    beat = Pulse().beat()
    assert hung_rank({number: replace(beat, **usual | each) for number, each in enumerate(ranks)}) == blamed
