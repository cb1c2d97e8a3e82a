"""What the ranks of a host share: its cores, and the folder in which extensions are compiled."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.helpers import STAGES

from alignment.config.dtypes import Machine, planning_for
from alignment.engines import host
from alignment.engines.host import EXTENSIONS, compiling, share_cores, users_threads
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


def test_a_lock_that_remains_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch waits for this file, of this name, to vanish."""
    from torch.utils import cpp_extension

    monkeypatch.setenv(EXTENSIONS, str(tmp_path))
    monkeypatch.setattr(host, "_TELL_S", 0.2)
    (tmp_path / "own").mkdir()
    assert Path(cpp_extension._get_build_directory("own", False)) == tmp_path / "own"
    (tmp_path / "own" / "lock").touch()
    with compiling():
        pass
    time.sleep(0.4)
    assert capsys.readouterr().err == ""
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with compiling():
            time.sleep(0.6)
        assert (f"{tmp_path / 'own' / 'lock'}: remove this file" in capsys.readouterr().err) == (rank == "0")


@pytest.mark.parametrize(("here", "own"), [("2", False), ("1", True)])
def test_several_hosts_compile_in_separate_folders(here: str, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXTENSIONS, "")
    monkeypatch.delenv(EXTENSIONS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    with compiling():
        assert (f"/{socket.gethostname()}-" in os.environ.get(EXTENSIONS, "")) == own
    monkeypatch.setenv(EXTENSIONS, "/mine")
    with compiling():
        assert os.environ[EXTENSIONS] == "/mine"
