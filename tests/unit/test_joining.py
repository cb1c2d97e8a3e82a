"""Ranks that meet before they join: reasons why one cannot, and what the others learn. Ranks are threads here."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch

from alignment.config.errors import AlignmentError
from alignment.run.deadlines import within
from alignment.run.failures import JoinError, ReportedElsewhere, describe
from alignment.run.joining import interfaces, meeting, names, start
from alignment.run.joining.interfaces import address_for_others, check_named
from alignment.run.joining.meeting import Meeting
from alignment.run.joining.place import Place
from alignment.run.joining.port import holder_of
from tools.ranks.process import free_port

OWN = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "fe80::1%eth0"], "ib0": ["10.1.0.5"]}


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher here would blame the first rank that exits."""
    monkeypatch.setattr(meeting, "_LATER_S", 0.1)


def fine() -> None:
    """A check that succeeds."""


def loopback() -> str:
    """The address at which hosts, which are threads of this process, reach each other."""
    return "127.0.0.1"


def refuse() -> Any:
    """A check that fails."""
    raise AlignmentError("GLOO_SOCKET_IFNAME=ib9")


def places(count: int, hosts: int = 1) -> list[Place]:
    """The places of the ranks of a new run, with the same number of ranks per host."""
    first = Place("127.0.0.1", free_port(), 0, 0, count, False, "0/0", "host0", "network0")
    each = count // hosts
    return [
        dataclasses.replace(
            first, rank=rank, local_rank=rank % each, host=f"host{rank // each}", network=f"network{rank // each}"
        )
        for rank in range(count)
    ]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results or exceptions of calls, each made in its own thread."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def ranks(
    all_places: list[Place], check: dict[int, Any] | None = None, address: dict[int, Any] | None = None
) -> list[Callable[[], None]]:
    """The meetings of all ranks, to be run concurrently."""
    check, address = check or {}, address or {}

    def agree(place: Place) -> None:
        made = Meeting(place, 10, advice="set GLOO_SOCKET_IFNAME")
        made.agree(check.get(place.rank, fine), address.get(place.rank, loopback))
        kept.append(made)

    kept: list[Meeting] = []
    return [lambda place=place: agree(place) for place in all_places]  # type: ignore[misc]


def test_all_ranks_meet_and_a_process_of_another_run_is_rejected() -> None:
    asked: list[int] = []
    run = places(3)
    calls = ranks(run, address={rank: lambda: asked.append(1) or "" for rank in range(3)})
    assert together(*calls) == [None] * 3
    assert not asked, "on one host, addresses do not matter"
    with pytest.raises(
        JoinError, match=r"is used by another run, which already has a rank 1; choose another MASTER_PORT"
    ):
        calls[1]()
    # Its rank is not taken, but the others are about to train.
    with pytest.raises(JoinError, match="is used by another run"):
        Meeting(dataclasses.replace(run[0], rank=7), 5).agree(fine, loopback)


def test_a_place_is_read_from_the_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next meeting of a process is another one."""
    given = {"MASTER_ADDR": "a", "MASTER_PORT": "7", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    first = Place.of_environment()
    assert (first.address, first.port, first.rank, first.local_rank, first.world_size) == ("a", 7, 3, 1, 4)
    assert str(first) == "a:7" and first.host == socket.gethostname() and not first.agent
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    second = Place.of_environment()
    attempts = [tuple(map(int, place.attempt.split("/"))) for place in (first, second)]
    assert second.agent and attempts[0][0] == 0 and attempts[1] == (2, attempts[0][1] + 1)
    assert first.network == second.network and first.network


@pytest.mark.parametrize(("minutes", "seconds", "hours"), [(None, 60, 6), ("2", 120, 2 / 60)])
def test_limits_of_joining_and_of_waiting_for_each_other(
    minutes: str | None, seconds: float, hours: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    monkeypatch.delenv("DEEPSPEED_TIMEOUT", raising=False)
    if minutes is not None:
        monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **given: limits.append(given["timeout"].total_seconds()))
    monkeypatch.setattr(start, "set_group_timeout", lambda limit: limits.append(limit.total_seconds()))
    monkeypatch.setattr(start, "set_timeout_of_new_groups", lambda limit: limits.append(limit.total_seconds()))
    start.join("gloo")
    assert limits == [seconds, *[hours * 3600] * (1 if minutes else 2)]


def test_a_second_group_of_the_same_processes_meets_separately() -> None:
    run = places(2)
    assert together(*ranks(run)) == [None] * 2
    assert together(*ranks([dataclasses.replace(place, attempt="0/1") for place in run])) == [None] * 2


def test_an_agents_store_lets_workers_meet_again() -> None:
    from torch.distributed import TCPStore

    run = places(2)
    agent = TCPStore("127.0.0.1", run[0].port, is_master=True, wait_for_workers=False)
    served = [dataclasses.replace(place, agent=True) for place in run]
    assert together(*ranks(served)) == [None] * 2
    assert together(*ranks(served)) == [None] * 2
    del agent


@pytest.mark.parametrize("who", [0, 1, 2])
def test_all_ranks_learn_that_one_cannot_join(who: int) -> None:
    begun = time.monotonic()
    results = together(*ranks(places(3), check={who: refuse}))
    assert time.monotonic() - begun < 10
    assert type(results[who]) is JoinError
    assert str(results[who]) == "GLOO_SOCKET_IFNAME=ib9"
    for other in {0, 1, 2} - {who}:
        assert isinstance(results[other], ReportedElsewhere)
        assert str(results[other]) == f"rank {who} (host host0): GLOO_SOCKET_IFNAME=ib9"
        assert describe(results[other]) == ("", False), "it stops responding"


def test_a_late_rank_learns_of_it_too() -> None:
    run = places(2)
    calls = ranks(run, check={0: refuse})

    def first() -> None:
        """It serves the store as long as it is in the meeting."""
        with contextlib.suppress(JoinError):
            calls[0]()
        gc.collect()

    results = together(first, lambda: (time.sleep(1.0), calls[1]()))
    assert isinstance(results[1], ReportedElsewhere)


def test_hosts_have_to_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    assert together(*ranks(places(4, hosts=2))) == [None] * 4
    results = together(*ranks(places(4, hosts=2), address={2: refuse}))
    assert str(results[2]) == "GLOO_SOCKET_IFNAME=ib9"
    assert all(isinstance(results[other], ReportedElsewhere) for other in (0, 1, 3))
    before = meeting.refusal_of
    monkeypatch.setattr(
        meeting,
        "refusal_of",
        lambda *to: "No route to host" if threading.current_thread() in blocked else before(*to),
    )
    blocked: list[threading.Thread] = []

    def second() -> str:
        blocked.append(threading.current_thread())
        return "127.0.0.1"

    results = together(*ranks(places(2, hosts=2), address={1: second}))
    line = "host host1 cannot reach host host0 at 127.0.0.1 (No route to host); set GLOO_SOCKET_IFNAME"
    assert str(results[1]) == line
    assert str(results[0]) == f"rank 1 (host host1): {line}"


def test_missing_ranks_are_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_TELL_S", 0.5)
    with pytest.raises(
        JoinError, match=r"only 1 of 3 ranks arrived at 127\.0\.0\.1:\d+ within 1 s; missing: 1, 2; start"
    ):
        Meeting(places(3)[0], 1).agree(fine, loopback)
    assert "rank 0 (host host0): waiting at 127.0.0.1:" in capsys.readouterr().err
    with pytest.raises(
        JoinError, match=r"rank 0 could not be reached at .* from host host0 within 1 s \(Connection r"
    ):
        Meeting(places(3)[2], 1).agree(fine, loopback)
    assert capsys.readouterr().err == "", "the first rank of a host reports it"


def test_a_rank_suspended_during_the_meeting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_STAGE_S", 0.5)
    monkeypatch.setattr(meeting, "_HUSH_S", 0.5)

    def stopped() -> str:
        time.sleep(4)
        return "127.0.0.1"

    begun = time.monotonic()
    results: list[Any] = [None] * 3
    calls = ranks(places(3, hosts=3), address={2: stopped})
    threads = [threading.Thread(target=lambda n=n: results.__setitem__(n, together(calls[n])[0])) for n in (0, 1)]
    late = threading.Thread(target=lambda: together(calls[2]), daemon=True)
    for thread in (*threads, late):
        thread.start()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - begun < 4
    line = (
        "but rank 2 (host host2) has made no progress for 0.5 s: the process is suspended, or its host or network is "
        "down"
    )
    assert all(
        line in str(results[rank]) and "all 3 ranks arrived at 127.0.0.1:" in str(results[rank]) for rank in (0, 1)
    )
    assert sorted(type(result) is ReportedElsewhere for result in results[:2]) == [False, True]
    late.join(10)


def test_an_unresponsive_store_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Meeting(places(2)[1], 60)
    made._store, made._answered = object(), time.monotonic()
    made._tell(1)
    made._answered -= 121
    with pytest.raises(JoinError, match=r"^rank 0, which serves the store at .*, has not responded to host host0 for"):
        made._tell(1)


def test_a_port_in_use_is_named_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        taken = [dataclasses.replace(place, port=port) for place in places(2)]
        assert (holder_of(port) or "").startswith(f"process {os.getpid()} (")
        with pytest.raises(JoinError) as caught:
            Meeting(taken[0], 5).agree(fine, loopback)
        with pytest.raises(
            JoinError, match=r"within 1 s \(the port accepts connections but does not respond\); start all ranks"
        ):
            Meeting(taken[1], 1).agree(fine, loopback)
        monkeypatch.setattr(meeting, "_ANSWER_S", 0.5)
        with pytest.raises(JoinError, match=r"127\.0\.0\.1:\d+, where rank 0 .* does not respond; choose another M"):
            Meeting(taken[1], 10).agree(fine, loopback)
    assert f"port {port} of host host0, the rendezvous port of the ranks (MASTER_PORT), is in use by process" in str(
        caught.value
    )
    assert holder_of(port) is None


def test_a_call_that_does_not_return_is_abandoned() -> None:
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        within(0.3, lambda: time.sleep(5))
    assert time.monotonic() - begun < 2
    assert within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(5, lambda: {}["missing"])


def slow(*_: object, **__: object) -> list[Any]:
    """A resolver whose servers do not respond."""
    time.sleep(5)
    return []


def unknown(*_: object, **__: object) -> list[Any]:
    """A resolver that does not know any name."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize(
    ("resolver", "reason"),
    [(slow, "the resolver did not respond within 0.3 s"), (unknown, "Name or service not known")],
)
def test_a_name_that_does_not_resolve_is_an_error_within_seconds(
    resolver: Callable[..., list[Any]], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MASTER_ADDR": "node-7", "MASTER_PORT": "29500", "RANK": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(start, "_RESOLVE_S", 0.3)
    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    begun = time.monotonic()
    with pytest.raises(JoinError) as caught:
        start.meet("gloo", 60)
    assert time.monotonic() - begun < 2
    assert str(caught.value).startswith("MASTER_ADDR=node-7 cannot be resolved on host ")
    assert f"({reason}); set it to the name or address of rank 0's host" in str(caught.value)


def test_a_name_that_appears_a_moment_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(2, 1, 6, "", ("10.0.0.1", 0))] * 2
    answers = iter([unknown, lambda *_, **__: found])
    resolve = socket.getaddrinfo  # an abandoned thread may still look up another name

    def later(name: str, *arguments: Any, **more: Any) -> Any:
        return (next(answers) if name == "node-8" else resolve)(name, *arguments, **more)

    monkeypatch.setattr(names, "_PAUSE_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", later)
    assert names.look_up("node-8", 5) == ["10.0.0.1"]


@pytest.mark.parametrize(
    ("backend", "value", "expected"),
    [
        ("gloo", None, None),
        ("gloo", "eth0,ib0", None),
        (
            "gloo",
            "eth0,eth1",
            "GLOO_SOCKET_IFNAME=eth0,eth1, but host h has no interface eth1 that is up; it has lo (",
        ),
        ("gloo", "eth", "no interface eth that is up; it has lo (127.0.0.1, ::1), eth0 (10.0.0.5), ib0 (10.1.0.5)"),
        ("nccl", "eth", None),
        ("nccl", "=eth", "NCCL_SOCKET_IFNAME==eth, but host h has no interface =eth that is up"),
        ("nccl", "^lo,eth,ib", "no interface ^lo,eth,ib that is up"),
    ],
)
def test_a_variable_without_a_matching_interface(
    backend: str, value: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_interface(monkeypatch, backend, value)
    if expected is None:
        check_named(backend, OWN)
        return
    with pytest.raises(AlignmentError) as caught:
        check_named(backend, OWN)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("backend", "value", "resolves", "expected"),
    [
        (
            "gloo",
            None,
            ["127.0.0.1"],
            "the host name h resolves to 127.0.0.1, a loopback address that other hosts",
        ),
        (
            "gloo",
            None,
            [],
            "the host name h cannot be resolved (to an address of this host), so gloo would use 127.0.0.1",
        ),
        ("gloo", "eth0", ["127.0.0.1"], "=10.0.0.5"),
        (
            "gloo",
            "lo",
            [],
            "GLOO_SOCKET_IFNAME=lo selects lo, which other hosts cannot reach on host h; set GLOO_SOCKET",
        ),
        ("nccl", None, [], "=10.1.0.5"),  # InfiniBand first
        ("nccl", "eth,ib", [], "=10.0.0.5"),
        ("nccl", "ib", [], "=10.1.0.5"),
        ("nccl", "^eth,lo", [], "=10.1.0.5"),
        ("nccl", "lo", [], "host h has eth0 (10.0.0.5), ib0 (10.1.0.5)"),
    ],
)
def test_the_address_for_other_hosts(
    backend: str, value: str | None, resolves: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_interface(monkeypatch, backend, value)
    monkeypatch.setattr(interfaces, "look_up", lambda name, seconds: resolves)
    if expected.startswith("="):
        assert address_for_others(backend, OWN) == expected[1:]
        return
    with pytest.raises(AlignmentError) as caught:
        address_for_others(backend, OWN)
    assert expected in str(caught.value)


def test_a_host_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    set_interface(monkeypatch, "nccl", None)
    with pytest.raises(AlignmentError, match="host h has no network interface that connects to other hosts"):
        address_for_others("nccl", {"lo": ["127.0.0.1"]})


def test_nccl_skips_containers_and_link_local_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    set_interface(monkeypatch, "nccl", None)
    own = {"lo": ["127.0.0.1"], "docker0": ["172.17.0.1"], "virbr0": ["192.168.122.1"], "en0": ["fe80::1", "10.2.0.5"]}
    assert address_for_others("nccl", own) == "10.2.0.5"


def test_gloo_uses_the_first_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "look_up", lambda name, seconds: ["192.0.2.1", "127.0.0.1"])
    assert interfaces.gloo_address("h") == "127.0.0.1"


def test_the_interfaces_of_this_machine() -> None:
    assert "127.0.0.1" in interfaces.interfaces()["lo"]


def set_interface(monkeypatch: pytest.MonkeyPatch, backend: str, value: str | None) -> None:
    """Set or remove the backend's variable; the host is called h."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h")
    name = interfaces.variable(backend)
    monkeypatch.setenv(name, value or "")
    if value is None:
        monkeypatch.delenv(name)
