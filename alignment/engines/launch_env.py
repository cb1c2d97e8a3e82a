"""Ranks and the process group, for any launcher.

`prepare_environment` completes the variables that torch and DeepSpeed read; it needs neither of them and returns
immediately. `init_distributed` selects the accelerator, the device and the backend, and joins the process group.
Nothing here reads options or arguments: only the environment determines this process's rank.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys

from alignment.config.dtypes import planned
from alignment.config.errors import AlignmentError, OptionError, counted, setting
from alignment.engines.memory.allocator import grow_segments
from alignment.internals.bitsandbytes import hush_missing_kernel
from alignment.internals.deepspeed import measure_free_memory, skip_shared_memory_op
from alignment.internals.torch import hush_deprecated_collectives
from alignment.run.joining.start import join

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RANKS = VARIABLES[:4]
# "pid:port" of a process that set up a world of one. Its children inherit the variables, which must not be mistaken
# for a launcher's because the port is in use.
_SINGLE = "ALIGNMENT_SINGLE_PROCESS"
# SLURM numbers the steps that `srun` did not create (batch, interactive, extern, pending) from the top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_LAST_PORT = 65535
NOTICE = "ALIGNMENT_STOP_NOTICE"  # checked here: it is read too late for an error
_MOST_DIGITS = 18


def rank() -> int:
    """The rank of this process, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """The rank of this process among those of its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """The number of processes of this run, or of the planned one."""
    machine = planned()
    return int(os.environ.get("WORLD_SIZE", "1")) if machine is None else machine.ranks


def prepare_environment() -> None:
    """Complete RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in `os.environ`.

    `deepspeed` and `torchrun` set them; inside a SLURM job step they are derived from srun's variables; without a
    launcher, this process becomes a world of one with a free port. Repeated calls have no effect.

    Raises:
        AlignmentError: only some are set, a value is not a number in range, or the launcher is `mpirun`.
    """
    _forget_parent()
    if "RANK" not in os.environ and _in_slurm_step():
        _from_slurm()
    elif any(name in os.environ for name in _RANKS):
        _from_launcher()
    else:
        _refuse_mpi()
        _single_process()
    _check_numbers()


def _forget_parent() -> None:
    pid, _, port = os.environ.get(_SINGLE, "").partition(":")
    inherited = pid not in ("", str(os.getpid()))
    if inherited and os.environ.get("WORLD_SIZE") == "1" and os.environ.get("MASTER_PORT") == port:
        for name in (*VARIABLES, _SINGLE):
            os.environ.pop(name, None)


def _from_launcher() -> None:
    """Fill in LOCAL_WORLD_SIZE, which `deepspeed` calls LOCAL_SIZE, and require the rest."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        guess = os.environ.get("LOCAL_SIZE") or ("1" if os.environ.get("WORLD_SIZE") == "1" else None)
        if guess is not None:
            os.environ["LOCAL_WORLD_SIZE"] = guess
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        given = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
        raise AlignmentError(
            f"the environment has {', '.join(given)} but not {', '.join(missing)}; set all of {', '.join(VARIABLES)}, "
            "or unset them and start with `deepspeed`, `torchrun` or `srun`"
        )


def _single_process() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {name: "1" if name.endswith("WORLD_SIZE") else "0" for name in _RANKS}
    # A MASTER_ADDR or MASTER_PORT left in the shell is irrelevant to a world of one.
    os.environ.update(values, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ[_SINGLE] = f"{os.getpid()}:{port}"


def _refuse_mpi() -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") != "1":
            raise AlignmentError(
                f"{name}={os.environ[name]}: mpirun is not supported, since each process would train on its own; "
                "start with `deepspeed`, `torchrun` or `srun`"
            )


def _check_numbers() -> None:
    values = {name: _number(name) for name in _RANKS}
    if not 1 <= _number("MASTER_PORT") <= _LAST_PORT:
        raise AlignmentError(
            f"the environment has MASTER_PORT={os.environ['MASTER_PORT']}; set a free port of rank 0's host, 1 to "
            f"{_LAST_PORT}"
        )
    if not os.environ["MASTER_ADDR"].strip():
        raise AlignmentError(
            "the environment has an empty MASTER_ADDR; set it to the name or address of rank 0's host"
        )
    if _number("DEEPSPEED_TIMEOUT", 1) < 1:  # DeepSpeed reads it on import
        raise AlignmentError("the environment has DEEPSPEED_TIMEOUT=0; set it to 1 or more minutes, or unset it")
    notice = os.environ.get(NOTICE, "")
    if notice and not (notice.isascii() and re.fullmatch(r"\d{1,9}(\.\d*)?", notice)):
        raise AlignmentError(f"{setting(NOTICE, notice)} in the environment: expected a number of seconds")
    for place, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if values[place] >= values[size]:
            raise AlignmentError(
                f"the environment has {place}={values[place]} with {size}={values[size]}; "
                f"{place} must be between 0 and {size} - 1"
            )


def _number(name: str, default: int | None = None) -> int:
    """Read an integer variable.

    Args:
        name: name of the variable.
        default: value if it is not set.

    Raises:
        AlignmentError: the value is not an integer of 0 or more.
    """
    text = os.environ.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise AlignmentError(f"{setting(name, text)} in the environment: expected an integer of 0 or more")
    return int(text)


def _in_slurm_step() -> bool:
    """Whether `srun` started this process. A bare `sbatch` or `salloc` shell has job variables but is one process."""
    step = os.environ.get("SLURM_STEP_ID", "")
    numbered = step.isascii() and step.isdecimal() and len(step) <= _MOST_DIGITS
    return numbered and int(step) < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in os.environ


def _from_slurm() -> None:
    def need(*names: str) -> str:
        for name in names:
            if os.environ.get(name):
                return os.environ[name]
        raise AlignmentError(
            f"{names[0]} is not set in this SLURM job step; start with `srun`, `deepspeed` or `torchrun`"
        )

    size = need("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    found = {"RANK": need("SLURM_PROCID"), "WORLD_SIZE": size, "LOCAL_RANK": need("SLURM_LOCALID")}
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE") or size
    found["LOCAL_WORLD_SIZE"] = str(tasks_on_node(per_node, _number("SLURM_NODEID", 0)))
    for name, value in found.items():
        if os.environ.setdefault(name, value) != value:
            raise AlignmentError(f"the environment has {name}={os.environ[name]}, but srun set {value}; unset {name}")
    os.environ.setdefault(
        "MASTER_ADDR", first_host(need("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"))
    )
    job = _number("SLURM_JOB_ID" if os.environ.get("SLURM_JOB_ID") else "SLURM_JOBID", 0)
    # Below Linux's ephemeral ports; different for two steps of one job and for two neighboring jobs on a node.
    os.environ.setdefault("MASTER_PORT", str(15000 + (job + 101 * int(os.environ["SLURM_STEP_ID"])) % 15000))


def tasks_on_node(spec: str, node: int) -> int:
    """Tasks on the `node`-th node of a SLURM list such as `2(x3),1` (two on each of three nodes, then one)."""
    nodes = 0
    for part in spec.split(","):
        matched = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", part, re.ASCII)
        if matched is None:
            raise AlignmentError(f"{setting('SLURM_STEP_TASKS_PER_NODE', spec)}: expected a list such as 2(x3),1")
        nodes += int(matched[2] or 1)
        if node < nodes:
            return int(matched[1])
    raise AlignmentError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={spec} lists {nodes} nodes")


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list such as `node[01-04,7],other`, expanded by `scontrol` if available."""
    if shutil.which("scontrol"):
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", nodelist], capture_output=True, text=True, check=False
        )
        if answer.returncode == 0 and answer.stdout.split():
            return answer.stdout.split()[0]
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if first is None:
        raise AlignmentError(
            f"the SLURM node list {nodelist!r} cannot be parsed; set MASTER_ADDR to the first node's name"
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def init_distributed(use_cpu: bool) -> None:
    """Select CPU or CUDA, set this rank's device, and join the process group (gloo or NCCL) through DeepSpeed.

    `use_cpu` selects the CPU even if there is a GPU. The CPU is also used without a GPU, and with DS_ACCELERATOR=cpu
    in the environment. Repeated calls have no effect.

    Raises:
        OptionError: DeepSpeed was imported for the other kind of device, or there is no GPU for this rank.
        AlignmentError: the environment is incomplete, or rank 0 cannot be reached.
    """
    prepare_environment()
    import torch

    wanted = _accelerator(use_cpu or not torch.cuda.is_available())
    if wanted == "cuda":
        grow_segments()
        _set_cuda_device()
    else:
        _share_cores()
    import deepspeed

    from alignment.engines.memory.devices import free_bytes

    if wanted == "cpu":
        skip_shared_memory_op()
    else:
        measure_free_memory(free_bytes)
    if deepspeed.comm.is_initialized():
        return
    join("gloo" if wanted == "cpu" else "nccl")


def _accelerator(use_cpu: bool) -> str:
    """Select DeepSpeed's accelerator, which is fixed at its first import. Returns `cpu` or `cuda`."""
    asked = os.environ.get("DS_ACCELERATOR")
    if asked not in (None, "cpu", "cuda"):
        raise OptionError(f"DS_ACCELERATOR={asked} is not supported; set it to cpu or cuda, or unset it")
    if asked == "cuda" and use_cpu and "deepspeed" not in sys.modules:
        raise OptionError("DS_ACCELERATOR=cuda, but there is no usable GPU or use_cpu is set; unset DS_ACCELERATOR")
    wanted = "cpu" if use_cpu or asked == "cpu" else "cuda"
    if "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = wanted
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    if found != wanted:
        raise OptionError(
            f"use_cpu={use_cpu}, but DeepSpeed was already imported for {found}; set DS_ACCELERATOR={wanted} in the "
            "environment, or set use_cpu accordingly"
        )
    return wanted


def _set_cuda_device() -> None:
    import torch

    count = torch.cuda.device_count()
    if local_rank() >= count:
        raise OptionError(
            f"LOCAL_RANK={local_rank()}, but this process sees {counted(count, 'GPU')}; start at most one process "
            "per GPU on each node; if srun binds one GPU to each task, add --gpu-bind=none"
        )
    torch.cuda.set_device(local_rank())
    _check_architecture(local_rank())


def _check_architecture(index: int) -> None:
    """Check that this build of torch has kernels for a GPU; the first one it launches would fail in CUDA's words."""
    import torch

    built_for = [int(digits[0]) for name in torch.cuda.get_arch_list() if (digits := re.findall(r"^sm_(\d+)", name))]
    major, minor = torch.cuda.get_device_capability(index)
    if built_for and 10 * major + minor < min(built_for):
        raise AlignmentError(
            f"torch {torch.__version__} supports compute capability {min(built_for) / 10:.1f} and newer, but "
            f"{torch.cuda.get_device_name(index)} has {major}.{minor}; install a build for an older CUDA, for example "
            "with --index-url https://download.pytorch.org/whl/cu126"
        )


def _share_cores() -> None:
    """Split the cores among this node's ranks: if each used all of them, they would be many times slower."""
    import torch

    ranks_here = int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks_here > 1 and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // ranks_here))


def hush_libraries() -> None:
    """Silence warnings of libraries about their own internals, which every rank would print and no user can fix."""
    hush_missing_kernel()
    hush_deprecated_collectives()
