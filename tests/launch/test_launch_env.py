"""Ranks from the environment of any launcher, and the resulting process group."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from alignment.cli.parsing import glimpse
from alignment.config.errors import AlignmentError
from alignment.engines import launch_env
from alignment.run import ranks
from alignment.run.ranks import VARIABLES, first_host, prepare_environment

TORCHRUN = {
    **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "node7", "MASTER_PORT": "29501"},
}
SRUN = {
    **{"SLURM_JOB_ID": "40123", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"},
    **{"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "6"},
    **{"SLURM_STEP_NODELIST": "gpu[03-05],login1", "SLURM_NODELIST": "gpu[01-05],login1"},
}
OWN = (*VARIABLES, "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove launcher variables and the process group, and undo changes made by the code."""
    for name in (*OWN, *os.environ):
        if name in OWN or name.startswith(("SLURM_", "OMPI_", "PMI_")):
            monkeypatch.setenv(name, "")
            del os.environ[name]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


def prepared(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> dict[str, str | None]:
    """Return the variables that are set in an environment with these."""
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    prepare_environment()
    return {name: os.environ.get(name) for name in TORCHRUN}


def test_a_launchers_variables_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(monkeypatch, TORCHRUN) == TORCHRUN
    assert (ranks.rank(), ranks.local_rank(), ranks.world_size()) == (3, 1, 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # which `deepspeed` does not set
    assert prepared(monkeypatch, {}) == TORCHRUN | {"LOCAL_WORLD_SIZE": None}


def test_plain_python_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    found = prepared(monkeypatch, {"MASTER_ADDR": "left-in-the-shell"})
    assert {name: found[name] for name in one} == one
    assert prepared(monkeypatch, {}) == found


def test_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"MASTER_ADDR": "gpu03", "MASTER_PORT": str(15000 + (40123 + 202) % 15000)}
    expected = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": None, **address}
    prepared(monkeypatch, {})  # of a process that trains alone, and then calls srun
    assert prepared(monkeypatch, SRUN) == expected
    monkeypatch.delenv("RANK")
    assert prepared(monkeypatch, {"MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1"
    monkeypatch.delenv("RANK")
    with pytest.raises(AlignmentError, match="WORLD_SIZE=8, but srun set 6; unset WORLD_SIZE"):
        prepared(monkeypatch, {"WORLD_SIZE": "8"})
    assert [first_host(each) for each in ("other,node[01-04]", "rack[2,4]-n[10-12]")] == ["other", "rack2-n10"]


@pytest.mark.parametrize(("step", "rank"), [("4294967279", "5"), ("4294967280", "0"), ("x", "0"), ("", "0")])
def test_a_bare_batch_or_salloc_shell_is_one_process(monkeypatch: pytest.MonkeyPatch, step: str, rank: str) -> None:
    assert prepared(monkeypatch, {**SRUN, "SLURM_STEP_ID": step})["RANK"] == rank


@pytest.mark.parametrize(
    ("name", "last", "beyond"),
    [
        ("MASTER_PORT", "65535", "65536"),
        ("RANK", "3", "4"),
        ("LOCAL_RANK", "1", "2"),
        ("WORLD_SIZE", "4", "3"),
        ("LOCAL_WORLD_SIZE", "2", "1"),
        ("DEEPSPEED_TIMEOUT", "1", "0"),
        ("RANK", "0", "-1"),
        ("RANK", "3", "\u0663"),
        ("MASTER_ADDR", "a", " "),
        ("ALIGNMENT_STOP_NOTICE", "1", "1s"),
    ],
)
def test_values_at_their_limits(name: str, last: str, beyond: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(monkeypatch, {**TORCHRUN, name: last})
    with pytest.raises(AlignmentError, match="RANK" if name.endswith("WORLD_SIZE") else name):
        prepared(monkeypatch, {name: beyond})


def test_wants_cpu(tmp_path: os.PathLike[str]) -> None:
    recipe = os.path.join(tmp_path, "own.yaml")
    with open(recipe, "w", encoding="utf-8") as file:
        file.write("method: kto\ntraining:\n  use_cpu: True  # no GPU here\n")
    for arguments in (["--local_rank=0", recipe], [recipe, "--beta", "-1"], ["--use_cpu", "--beta", "0.1"]):
        assert glimpse(arguments).use_cpu
    for arguments in ([recipe, "--use_cpu", "false"], ["missing.yaml", "--beta", "0.1"], ["--use_cpuu"]):
        assert not glimpse(arguments).use_cpu


PROBE = """
import os
from alignment.config.errors import OptionError
from alignment.engines.launch_env import init_distributed
init_distributed(use_cpu=True)
init_distributed(use_cpu=True)
import deepspeed, torch
assert os.environ["DS_ACCELERATOR"] == "cpu" == deepspeed.accelerator.get_accelerator().device_name()
assert torch.distributed.get_backend() == "gloo" and deepspeed.comm.is_initialized()
assert deepspeed.comm.comm.cdb.shm_comm_op is None
torch.cuda.is_available = lambda: True
del os.environ["DS_ACCELERATOR"]
try:
    init_distributed(use_cpu=False)
except OptionError as error:
    print(error)
"""


@pytest.mark.ci
def test_the_group_starts_on_a_machine_without_a_compiler(tmp_path: os.PathLike[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    environment["PATH"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("use_cpu=False, but DeepSpeed was already imported for cpu; set DS_ACCELERATOR=cuda")


@pytest.mark.parametrize(
    ("architectures", "fits"),
    [(["sm_75", "sm_90a", "sm_120", "compute_120"], False), (["sm_50", "sm_70", "sm_90"], True), ([], True)],
)
def test_a_gpu_that_torch_was_not_built_for(
    architectures: list[str], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 0) if index == 1 else (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    with nullcontext() if fits else pytest.raises(AlignmentError, match="7.5 and newer, but Tesla V100 has 7.0"):
        launch_env._set_cuda_device()
    assert chosen == [1]
