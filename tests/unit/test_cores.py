"""The cores of a host are shared among its ranks, and whose OMP_NUM_THREADS applies."""

from __future__ import annotations

import os
from typing import Any

import psutil
import pytest
import torch
from support.helpers import STAGES

from alignment.config.dtypes import Machine, planning_for
from alignment.engines import host
from alignment.engines.host import share_cores, users_threads
from alignment.planning.engines import EnginePlan

ALL = list(range(8))


@pytest.mark.parametrize(
    ("everyone", "threads", "said"),
    [
        ([("a", ALL)], None, "(8 cores, 1 rank;"),
        ([("a", ALL)] * 3, 2, "(8 cores, 3 ranks;"),
        ([("a", ALL), ("b", ALL)], None, " 1 rank;"),
        ([("a", ALL), ("a", [1, 2])], 8, " 1 rank;"),  # bound by the launcher to separate cores
    ],
)
def test_each_rank_takes_its_share(
    everyone: list[Any], threads: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(host.socket, "gethostname", lambda: "a")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*ALL})
    monkeypatch.setattr(host, "gathered", lambda own: everyone)
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str([host for host, _ in everyone].count("a")))
    expected = [] if threads is None else [threads]
    assert said in share_cores() and used == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS=5" in share_cores() and used == expected


@pytest.mark.parametrize(
    ("given", "torchrun", "started", "own"),
    [(None, True, {}, None), ("3", True, {}, "3"), ("1", True, {}, None), ("1", False, {}, "1"),
     ("1", True, {"OMP_NUM_THREADS": "1"}, "1")],
)  # fmt: skip
def test_the_users_thread_count_is_kept_but_not_torchruns(
    given: str | None, torchrun: bool, started: dict[str, str], own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("OMP_NUM_THREADS", given), ("TORCHELASTIC_RUN_ID", "none" if torchrun else None)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(psutil.Process, "environ", lambda self: started if self.pid == os.getppid() else {})
    assert users_threads() == own


@pytest.mark.parametrize(
    ("stage", "cuda", "works"),
    [("stage2", True, False), ("stage2-offload", True, True), ("stage3-offload", True, True), ("stage2", False, True)],
)
def test_work_in_host_memory_is_offloading_or_a_cpu(
    stage: str, cuda: bool, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignment.planning.engines.uses_cuda", lambda options: cuda)
    plan = EnginePlan(None, None, STAGES[stage], {}, None)  # type: ignore[arg-type]
    assert plan.works_in_host_memory(None) == works  # type: ignore[arg-type]
    with planning_for(Machine(2, True)):
        assert not plan.works_in_host_memory(None)  # type: ignore[arg-type]
