"""Which rank this process is: the one source of rank, local rank and world size, for any launcher.

The first rank prints the lines for the user.
"""

from __future__ import annotations

import os
import re
import socket
import sys

from alignment.config.dtypes import planned
from alignment.config.errors import AlignmentError, setting

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NOTICE = "ALIGNMENT_STOP_NOTICE"  # checked here, because it is read too late for an error
_RANKS = VARIABLES[:3]
_ANY_PORT = "0"  # the system chooses a free one; only a process without a launcher has it
# SLURM numbers the steps that `srun` did not create (batch, interactive, extern, pending) from the top of 32 bits.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_NUMBER = re.compile(r"[0-9]{1,18}")


def rank() -> int:
    """The rank of this process, 0 without a launcher."""
    return _number_of("RANK", 0)


def local_rank() -> int:
    """The rank of this process among those of its node."""
    return _number_of("LOCAL_RANK", 0)


def world_size() -> int:
    """The number of processes of this run, or of the planned one."""
    machine = planned()
    return _number_of("WORLD_SIZE", 1) if machine is None else machine.ranks


def _number_of(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if _NUMBER.fullmatch(text) else default


def prepare_environment() -> None:
    """Complete RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in `os.environ`, for DeepSpeed and others.

    An initialized process group decides, as in a worker of ``mp.spawn``. Otherwise `deepspeed` and `torchrun` set the
    variables, and inside a SLURM job step they are derived from srun's. Without a launcher, this process becomes a
    world of one, which needs no address. Repeated calls have no effect.

    Raises:
        AlignmentError: variables are missing, out of range or contradictory, or the launcher is `mpirun`.
    """
    if os.environ.get("MASTER_PORT") == _ANY_PORT and _in_slurm_step():
        for name in (*VARIABLES, "LOCAL_WORLD_SIZE"):  # of a process that trained alone, and then called srun
            os.environ.pop(name, None)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        take_from_group()
    elif "RANK" not in os.environ and _in_slurm_step():
        _take_from_slurm()
    elif any(name in os.environ for name in _RANKS):
        for name in _RANKS if os.environ.get("WORLD_SIZE") == "1" else VARIABLES:
            _need(name)
    else:
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
            if os.environ.get(name, "1") != "1":
                what = f"{name}={os.environ[name]}: mpirun is not supported, since each process would train on its own"
                raise AlignmentError(f"{what}; start with `deepspeed`, `torchrun` or `srun`")
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        if "MASTER_PORT" not in os.environ:  # for libraries that create a group from it, as accelerate does
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=_ANY_PORT)
    _check_numbers()


def take_from_group() -> None:
    """Set the variables from the process group, or compare them with it; complete LOCAL_WORLD_SIZE. Collective."""
    import torch.distributed as dist

    from alignment.internals.torch import default_store

    own, size = dist.get_rank(), dist.get_world_size()
    _set({"RANK": str(own), "WORLD_SIZE": str(size)}, "the process group has")
    if "LOCAL_RANK" in os.environ and "LOCAL_WORLD_SIZE" in os.environ:
        return
    store = default_store()  # a collective of NCCL would already need the local rank
    store.set(f"alignment.host/{own}", socket.gethostname())
    hosts = [store.get(f"alignment.host/{other}") for other in range(size)]
    os.environ.setdefault("LOCAL_RANK", str(hosts[:own].count(hosts[own])))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(hosts.count(hosts[own])))


def _need(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        what = f"{name} is not set in the environment of this rank; start with `deepspeed`, `torchrun` or `srun`"
        raise AlignmentError(f"{what}, or set all of {', '.join(VARIABLES)}, or unset them to run in one process")
    return value


def _in_slurm_step() -> bool:
    """Whether `srun` started this process. A bare `sbatch` or `salloc` shell has job variables but is one process."""
    step = _number_of("SLURM_STEP_ID", _FIRST_SPECIAL_STEP)
    return step < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in os.environ


def _take_from_slurm() -> None:
    found = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    _set({name: _need(variable) for name, variable in found.items()}, "srun set")
    os.environ.setdefault("MASTER_ADDR", first_host(_need("SLURM_STEP_NODELIST")))
    # Below Linux's ephemeral ports; different for two steps of one job and for two neighboring jobs on a node.
    offset = _number("SLURM_JOB_ID", default="0") + 101 * int(os.environ["SLURM_STEP_ID"])
    os.environ.setdefault("MASTER_PORT", str(15000 + offset % 15000))


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list such as `node[01-04,7],other`."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodelist).partition(",")[0]


def _set(found: dict[str, str], who: str) -> None:
    for name, value in found.items():
        if os.environ.setdefault(name, value) != value:
            raise AlignmentError(f"the environment has {name}={os.environ[name]}, but {who} {value}; unset {name}")


def _check_numbers() -> None:
    size = _number("WORLD_SIZE", least=1)
    _number("RANK", most=size - 1)
    _number("LOCAL_RANK", most=_number("LOCAL_WORLD_SIZE", least=1, default=str(size)) - 1)
    if size > 1:
        _number("MASTER_PORT", least=1, most=65535, default="1")  # not set if a script has made the group
    _number("DEEPSPEED_TIMEOUT", least=1, default="1")  # in minutes; DeepSpeed reads it on import
    if os.environ.get(NOTICE):
        _number(NOTICE)


def _number(name: str, *, least: int = 0, most: int | None = None, default: str = "") -> int:
    """Read an integer variable between two bounds."""
    text = os.environ.get(name, default)
    if not _NUMBER.fullmatch(text) or int(text) < least or (most is not None and int(text) > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise AlignmentError(f"{setting(name, text)} in the environment: expected an integer {limits}")
    return int(text)


def tell(text: str | None) -> None:
    """Print a line on the first rank; do nothing for None."""
    if text is not None and rank() == 0:
        print(text, flush=True)
