"""Ranks from the environment of any launcher, and the resulting process group."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from alignment.cli.parsing import glimpse
from alignment.config.errors import AlignmentError
from alignment.engines import launch_env
from alignment.engines.launch_env import VARIABLES, first_host, prepare_environment, tasks_on_node

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29501",
}
SRUN = {
    "SLURM_JOB_ID": "40123",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[03-05],login1",
    "SLURM_NODELIST": "gpu[01-05],login1",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove launcher variables and scontrol, and undo environment changes made by the code."""
    for name in list(os.environ):
        if name in (*VARIABLES, "LOCAL_SIZE", launch_env._SINGLE) or name.startswith(("SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    for name in (*VARIABLES, launch_env._SINGLE):
        monkeypatch.setenv(name, "")
        del os.environ[name]
    monkeypatch.setattr(shutil, "which", lambda name: None)


def set_all(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def found() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in VARIABLES}


def test_the_environment_of_torchrun_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, TORCHRUN)
    prepare_environment()
    assert found() == TORCHRUN
    assert (launch_env.rank(), launch_env.local_rank(), launch_env.world_size()) == (3, 1, 4)


def test_deepspeed_sets_the_local_size_under_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**TORCHRUN, "LOCAL_SIZE": "2"})
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    prepare_environment()
    assert found() == TORCHRUN


def test_plain_python_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "left-in-the-shell")
    prepare_environment()
    first = found()
    assert {**first, "MASTER_PORT": "free"} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "free",
    }
    prepare_environment()
    assert found() == first


def test_a_child_of_a_world_of_one_chooses_another_port() -> None:
    prepare_environment()
    code = "import os, alignment.engines.launch_env as e; e.prepare_environment(); print(os.environ['MASTER_PORT'])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip().isdecimal()
    assert child.stdout.strip() != os.environ["MASTER_PORT"]


def test_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, SRUN)
    prepare_environment()
    assert found() == {
        "RANK": "5",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(15000 + (40123 + 202) % 15000),
    }


def test_older_names_of_sruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a job ID, the port only depends on the step."""
    older = {name: value for name, value in SRUN.items() if name not in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID")}
    set_all(monkeypatch, {**older, "SLURM_TASKS_PER_NODE": "2(x3)"})
    prepare_environment()
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
    assert os.environ["MASTER_PORT"] == str(15000 + 202)


def test_srun_keeps_a_set_address_and_refuses_another_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29600"})
    prepare_environment()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("10.0.0.1", "29600")
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(AlignmentError, match="WORLD_SIZE=8, but srun set 6; unset WORLD_SIZE"):
        prepare_environment()


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_a_bare_batch_or_salloc_shell_is_one_process(monkeypatch: pytest.MonkeyPatch, step: str | None) -> None:
    set_all(monkeypatch, {**SRUN, "SLURM_STEP_ID": step or ""})
    prepare_environment()
    assert os.environ["WORLD_SIZE"] == "1"


@pytest.mark.parametrize(
    ("name", "last", "beyond"),
    [
        *(("MASTER_PORT", last, beyond) for last, beyond in (("1", "0"), ("65535", "65536"))),
        *((name, last, beyond) for name, last, beyond in (("RANK", "3", "4"), ("LOCAL_RANK", "1", "2"))),
        ("WORLD_SIZE", "4", "3"),
        ("LOCAL_WORLD_SIZE", "2", "1"),
        ("DEEPSPEED_TIMEOUT", "1", "0"),
        ("RANK", "0", "-1"),
        ("RANK", "0" * 18, "0" * 19),
        ("RANK", "3", "\u0663"),
        ("MASTER_ADDR", "a", " "),
        ("ALIGNMENT_STOP_NOTICE", "9" * 9, "9" * 10),
        ("ALIGNMENT_STOP_NOTICE", "1.5", "1.5s"),
    ],
)
def test_values_at_their_limits(name: str, last: str, beyond: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**TORCHRUN, name: last})
    prepare_environment()
    monkeypatch.setenv(name, beyond)
    with pytest.raises(AlignmentError) as caught:
        prepare_environment()
    assert name in str(caught.value)


@pytest.mark.parametrize(("step", "found_rank"), [("4294967279", "5"), ("4294967280", "0"), ("x", "0"), ("", "0")])
def test_the_steps_that_srun_numbers(step: str, found_rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, {**SRUN, "SLURM_STEP_ID": step})
    prepare_environment()
    assert os.environ["RANK"] == found_rank


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "1"}, "RANK=1, WORLD_SIZE=2 but not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 with WORLD_SIZE=4; RANK must be between 0 and WORLD_SIZE - 1"),
        ({**TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK='x' in the environment: expected an integer"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2: mpirun is not supported"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE='two': expected a list"),
    ],
)
def test_an_invalid_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], message: str
) -> None:
    set_all(monkeypatch, values)
    with pytest.raises(AlignmentError) as caught:
        prepare_environment()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node[01-04,7],other", "node01"),
        ("other,node[01-04]", "other"),
        ("rack[2,4]-n[10-12]", "rack2-n10"),
        ("login", "login"),
    ],
)
def test_first_host_without_scontrol(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_first_host_with_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is called with this list of names; if it fails, the brackets are parsed."""
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\n[ "$1 $2 $3" = "show hostnames a[7-8]" ] && printf "a7.cluster\\na8.cluster\\n"\n')
    script.chmod(0o755)
    monkeypatch.setattr(launch_env.shutil, "which", lambda name: str(script))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert first_host("a[7-8]") == "a7.cluster"
    assert first_host("b[1-2]") == "b1"


def test_tasks_on_node() -> None:
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    with pytest.raises(AlignmentError, match="lists 4 nodes"):
        tasks_on_node("2(x3),1", 4)


def wants_cpu(arguments: list[str]) -> bool:
    return glimpse(arguments).use_cpu


def test_wants_cpu(tmp_path: os.PathLike[str]) -> None:
    recipe = os.path.join(tmp_path, "own.yaml")
    with open(recipe, "w", encoding="utf-8") as file:
        file.write("method: kto\ntraining:\n  use_cpu: True  # no GPU here\n")
    assert wants_cpu(["--local_rank=0", recipe])
    assert wants_cpu([recipe, "--beta", "-1"])
    assert not wants_cpu([recipe, "--use_cpu", "false"])
    assert not wants_cpu([recipe, "--use_cpu=false"])
    assert wants_cpu(["--use_cpu", "--beta", "0.1"])
    assert wants_cpu(["--use_cpu=true"])
    assert not wants_cpu(["missing.yaml", "--beta", "0.1"])
    assert not wants_cpu(["--use_cpuu"])


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


def test_the_group_starts_on_a_machine_without_a_compiler(tmp_path: os.PathLike[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    environment["PATH"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("use_cpu=False, but DeepSpeed was already imported for cpu; set DS_ACCELERATOR=cuda")


@pytest.mark.parametrize(
    ("architectures", "fits"),
    [
        (["sm_75", "sm_80", "sm_90a", "sm_120", "compute_120"], False),  # of the wheels for CUDA 13
        (["sm_50", "sm_70", "sm_90"], True),
        (["gfx90a"], True),
        ([], True),
    ],
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
