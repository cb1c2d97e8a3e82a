"""Ranks that meet before they join: reasons why one cannot, and what the others learn."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from conftest import DRIVERS
from support.helpers import make_model

from alignment.config.errors import AlignmentError
from alignment.run import joining
from alignment.run.joining import join
from alignment.run.ranks import take_from_group
from tools.ranks import RankServer
from tools.ranks.process import free_port


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this process rank 0 of 3 on a free port. Returns a function that changes the environment."""

    def change(**given: object) -> None:
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))

    for name in ("DEEPSPEED_TIMEOUT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(joining, "_RESOLVE_S", 0.1)
    monkeypatch.setattr(joining, "_MEETINGS", itertools.repeat(0))
    change(RANK=0, LOCAL_RANK=0, WORLD_SIZE=3, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    return change


def test_missing_ranks_are_named(
    place: Callable[..., None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_TELL_S", 0.3)
    served = joining._connect(5)
    begun = time.monotonic()
    with pytest.raises(AlignmentError, match=r"2 of 3 ranks have not arrived: 1, 2 .*GLOO_SOCKET_IFNAME"):
        joining._meet(served, "gloo", 1)
    assert time.monotonic() - begun < 4
    assert "1 of 3 ranks have arrived" in capsys.readouterr().err


def test_a_store_that_is_lost(place: Callable[..., None]) -> None:
    served = [joining._connect(5)]
    place(RANK=1)
    client = joining._connect(5)
    served.clear()
    with pytest.raises(AlignmentError, match="could not connect to the other ranks"):
        joining._meet(client, "gloo", 5)


def test_a_port_in_use(place: Callable[..., None]) -> None:
    """By another program, or by another run; torchrun's agent lets the same ranks meet again."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        place(MASTER_PORT=other.getsockname()[1])
        with pytest.raises(AlignmentError, match=r"^MASTER_PORT=\d+ of host .* choose another --master_port"):
            joining._connect(5)
    place(MASTER_PORT=free_port())
    served = joining._connect(5)
    place(RANK=1)
    assert joining._connect(5) is not None
    with pytest.raises(AlignmentError, match=r"another run has a rank 1 there"):
        joining._connect(5)
    place(TORCHELASTIC_USE_AGENT_STORE="True")
    assert joining._connect(5) is not None
    del served


def test_a_name_is_looked_up_for_some_seconds(place: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    resolve, calls = socket.getaddrinfo, itertools.count()

    def later(name: str, *given: Any, **more: Any) -> Any:
        if name == "node-8" and next(calls) == 0:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1" if name == "node-8" else name, *given, **more)

    place(MASTER_ADDR="a..b")
    begun = time.monotonic()
    with pytest.raises(AlignmentError, match=r"MASTER_ADDR=a\.\.b"):
        joining._connect(60)
    assert time.monotonic() - begun < 5
    monkeypatch.setattr(joining, "_RESOLVE_S", 5.0)
    monkeypatch.setattr(socket, "getaddrinfo", later)
    place(MASTER_ADDR="node-8", RANK=1, MASTER_PORT=1)
    with pytest.raises(AlignmentError, match="refused"):
        joining._connect(0.1)


def test_a_world_of_one_needs_no_address(place: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch alone would try to resolve it for ten minutes. DEEPSPEED_TIMEOUT is the limit of collectives."""
    made: list[dict[str, Any]] = []
    limits: list[float] = []
    place(WORLD_SIZE=1, MASTER_ADDR="a..b", DEEPSPEED_TIMEOUT=2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **given: made.append(given))
    monkeypatch.setattr(deepspeed, "init_distributed", lambda **given: None)
    monkeypatch.setattr(joining, "take_from_group", lambda: None)
    for name in ("set_group_timeout", "set_timeout_of_new_groups"):
        monkeypatch.setattr(joining, name, lambda limit: limits.append(limit.total_seconds()))
    join("gloo")
    assert isinstance(made[0]["store"], torch.distributed.HashStore) and limits == [120, 120]


def test_a_group_that_contradicts_the_environment(place: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(AlignmentError, match="WORLD_SIZE=3, but the process group has 2"):
        take_from_group()


def test_ranks_that_cannot_connect_end_within_the_limit(
    place: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo waits several times its own limit for the connection of another rank."""
    place(WORLD_SIZE=1)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *given, **more: time.sleep(6))
    begun = time.monotonic()
    with pytest.raises(AlignmentError, match=r"could not connect to the other ranks"):
        joining._meet(joining._connect(5), "gloo", 1)
    assert time.monotonic() - begun < 4


def test_ranks_of_mp_spawn_know_each_other(ranks: RankServer, tmp_path: Path) -> None:
    """And they train; the launcher's variables are not set."""
    arguments = make_model(tmp_path / "model"), str(tmp_path / "out"), str(free_port())
    done = ranks.run(DRIVERS / "spawned_ranks.py", *arguments, nproc=1, timeout=120)
    seen = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert seen == [[0, 0, 2, "2", 4], [1, 1, 2, "2", 4]]
