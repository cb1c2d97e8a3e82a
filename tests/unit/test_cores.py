"""The cores of a host are shared among its ranks, and whose OMP_NUM_THREADS applies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import DRIVERS, environment
from helpers import STAGES

from alignment.config.dtypes import Machine, planning_for
from alignment.engines import cores
from alignment.engines.cores import Cores, cpu_quota, share, share_cores, users_threads
from alignment.engines.launch_env import init_distributed
from alignment.planning.engines import EnginePlan
from alignment.run.launchers import Launcher
from tools.ranks.client import ROOT

ALL = frozenset(range(8))


@pytest.mark.parametrize(
    ("everyone", "threads"),
    [
        ([Cores("a", ALL)], [8]),
        ([Cores("a", ALL)] * 3, [2, 2, 2]),
        ([Cores("a", ALL)] * 20, [1] * 20),
        ([Cores("a", ALL), Cores("b", ALL)], [8, 8]),
        # Bound by the launcher to separate cores, of which some ranks have more.
        ([Cores("a", frozenset({0, 1})), Cores("a", frozenset(range(2, 8)))], [2, 6]),
        ([Cores("a", frozenset({0, 1})), Cores("a", frozenset({1, 2}))], [1, 1]),
        # A container's quota is shared by its ranks; a SLURM task may have its own.
        ([Cores("a", ALL, "/", 3.0)] * 2, [1, 1]),
        ([Cores("a", ALL, f"/task{n}", 4.0) for n in range(2)], [4, 4]),
        ([Cores("a", ALL, "/", 64.0)] * 2, [4, 4]),
    ],
)
def test_each_rank_takes_its_share(everyone: list[Cores], threads: list[int]) -> None:
    assert [share(everyone, rank) for rank in range(len(everyone))] == threads


def limited(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_lowest_quota_of_a_group_and_its_parents_applies(tmp_path: Path) -> None:
    mounts = tmp_path / "sys" / "fs" / "cgroup"

    def quota(groups: str) -> tuple[str, float | None]:
        limited(tmp_path / "proc" / "self", cgroup=groups)
        return cpu_quota(tmp_path)

    assert cpu_quota(tmp_path) == ("", None)
    limited(mounts, cpu__max="max 100000\n")
    limited(mounts / "job", cpu__max="300000 100000\n")
    limited(mounts / "job" / "task", cpu__max="450000 100000\n")
    assert quota("0::/job/task\n") == ("/job/task", 3.0)
    assert quota("0::/\n") == ("/", None)
    assert quota("0::/elsewhere\n") == ("/elsewhere", None)
    limited(mounts / "cpu" / "box", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert quota("4:cpu,cpuacct:/box\n3:memory:/box\n") == ("/box", None)
    limited(mounts / "cpu" / "box", cpu__cfs_quota_us="150000")
    assert quota("4:cpu,cpuacct:/box\n") == ("/box", 1.5)


def test_the_users_thread_count_is_kept_but_not_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, str] = {}
    monkeypatch.setattr(cores, "launchers", lambda: [Launcher(1, "slurmstepd"), Launcher(2, "torchrun")])
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(environ=lambda: started if pid == 2 else {}))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert users_threads() is None
    started["OMP_NUM_THREADS"] = "1"
    assert users_threads() == "1"
    started.clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert users_threads() == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert users_threads() is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cores, "launchers", lambda: [Launcher(2, "deepspeed")])
    assert users_threads() == "1"


@pytest.mark.parametrize(
    ("launcher", "own"),
    [("torchrun", None), ("torch.distributed.run", None), ("torch.distributed.launch", None), ("run.py", None),
     ("accelerate", None), ("accelerate-launch", None), ("launch.py", "1"), ("deepspeed", "1"), ("slurmstepd", "1")],
)  # fmt: skip
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_launchers_that_set_one_thread(
    launcher: str, own: str | None, ranks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a single rank on a host."""
    monkeypatch.setattr(cores, "launchers", lambda: [Launcher(2, launcher)])
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(environ=dict))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert users_threads() == ("1" if ranks == "1" else own)


def test_threads_are_set_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    init_distributed(use_cpu=True)
    before = torch.get_num_threads()
    monkeypatch.setattr(cores, "own_cores", lambda: Cores("a", ALL, "/", 3.5))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        assert share_cores() == (
            "threads: 3 per rank for work in host memory (8 cores, limited to 3.5 by a quota, "
            "1 rank on this host); set OMP_NUM_THREADS to change it"
        )
        assert torch.get_num_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        torch.set_num_threads(5)
        assert share_cores() == "threads: 5 per rank (OMP_NUM_THREADS=5)"
        assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)


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


@pytest.mark.ci
@pytest.mark.parametrize(("given", "seen"), [(None, "None"), ("1", "1")])
def test_torchrun_sets_one_thread_without_being_asked(given: str | None, seen: str) -> None:
    variables = environment(PYTHONPATH=str(ROOT))
    variables.pop("OMP_NUM_THREADS", None)
    if given:
        variables["OMP_NUM_THREADS"] = given
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, DRIVERS / "threads.py"], env=variables, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["threads", seen] * 2
    assert os.environ.get("OMP_NUM_THREADS"), "the value of the tests, which was removed"
