"""The device of this process, and the process group on it."""

from __future__ import annotations

import os
import re
import sys

from alignment.config.errors import AlignmentError, OptionError, counted
from alignment.engines.memory import grow_segments
from alignment.engines.start_up import uncollected
from alignment.internals.bitsandbytes import hush_missing_kernel
from alignment.internals.deepspeed import measure_free_memory, skip_shared_memory_op
from alignment.internals.torch import hush_deprecated_collectives
from alignment.run.joining import join
from alignment.run.ranks import local_rank, prepare_environment


@uncollected()
def init_distributed(use_cpu: bool) -> None:
    """Select CPU or CUDA, set this rank's device, and join the process group (gloo or NCCL) through DeepSpeed.

    `use_cpu` selects the CPU even if there is a GPU. The CPU is also used without a GPU, and with DS_ACCELERATOR=cpu
    in the environment. Repeated calls have no effect.

    Raises:
        OptionError: DeepSpeed was imported for the other kind of device, or there is no GPU for this rank.
        AlignmentError: the environment is incomplete, or the ranks cannot join.
    """
    prepare_environment()
    import torch

    wanted = _accelerator(use_cpu or not torch.cuda.is_available())
    if wanted == "cuda":
        grow_segments()
        _set_cuda_device()
    import deepspeed

    from alignment.engines.memory import free_bytes

    if wanted == "cpu":
        skip_shared_memory_op()
    else:
        measure_free_memory(free_bytes)
    if not deepspeed.comm.is_initialized():
        join("gloo" if wanted == "cpu" else "nccl")


def _accelerator(use_cpu: bool) -> str:
    """Select DeepSpeed's accelerator, which is fixed at its first import. Returns `cpu` or `cuda`."""
    asked = os.environ.get("DS_ACCELERATOR")
    wanted = "cpu" if use_cpu or asked == "cpu" else "cuda"
    if asked not in (None, wanted):
        raise OptionError(f"DS_ACCELERATOR={asked}, but this run computes on {wanted}; unset it, or set cpu or cuda")
    if "deepspeed" not in sys.modules:
        os.environ["DS_ACCELERATOR"] = wanted
    from deepspeed.accelerator import get_accelerator

    found = get_accelerator().device_name()
    if found != wanted:
        what = f"use_cpu={use_cpu}, but DeepSpeed was already imported for {found}"
        raise OptionError(f"{what}; set DS_ACCELERATOR={wanted} in the environment, or set use_cpu accordingly")
    return wanted


def _set_cuda_device() -> None:
    """Set this rank's GPU, for which this build of torch must have kernels: they would fail in CUDA's words."""
    import torch

    own, count = local_rank(), torch.cuda.device_count()
    if own >= count:
        raise OptionError(
            f"LOCAL_RANK={own}, but this process sees {counted(count, 'GPU')}; start at most one process per GPU on "
            "each node; if srun binds one GPU to each task, add --gpu-bind=none"
        )
    torch.cuda.set_device(own)
    built_for = [int(digits) for name in torch.cuda.get_arch_list() for digits in re.findall(r"^sm_(\d+)", name)]
    major, minor = torch.cuda.get_device_capability(own)
    if built_for and 10 * major + minor < min(built_for):
        raise AlignmentError(
            f"torch {torch.__version__} supports compute capability {min(built_for) / 10:.1f} and newer, but "
            f"{torch.cuda.get_device_name(own)} has {major}.{minor}; install a build for an older CUDA, for example "
            "with --index-url https://download.pytorch.org/whl/cu126"
        )


def hush_libraries() -> None:
    """Silence warnings of libraries about their own internals, which every rank would print and no user can fix."""
    hush_missing_kernel()
    hush_deprecated_collectives()
