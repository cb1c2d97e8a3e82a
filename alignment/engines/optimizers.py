"""The optimizers by name: torch's, bitsandbytes' 8-bit ones, and DeepSpeed's own, which are compiled at first use."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.utils import cpp_extension

from alignment.config.dtypes import uses_cuda
from alignment.internals.deepspeed import is_prebuilt
from alignment.internals.torch import cuda_toolkit

if TYPE_CHECKING:
    from alignment.config.options import AlignmentConfig

_TORCH = "adamw_torch"  # what takes the place of a DeepSpeed optimizer that cannot be compiled


@dataclass(frozen=True)
class OptimizerKind:
    """Where an optimizer's class is found, and the arguments that make it the one that is meant.

    Attributes:
        home: module and class.
        arguments: fixed keyword arguments.
        adam: takes betas and eps.
        builder: DeepSpeed's name of the op that it needs compiled; None for a ready one.
        ignored: arguments that the class takes and does nothing with.
    """

    home: tuple[str, str]
    arguments: dict[str, Any]
    adam: bool = True
    builder: str | None = None
    ignored: tuple[str, ...] = ()

    def load(self) -> Callable[..., Optimizer]:
        """The class; importing it compiles nothing yet."""
        module, name = self.home
        made: Callable[..., Optimizer] = getattr(importlib.import_module(module), name)
        return made


# torch's fused kernel needs no temporary copy of the weights, and on a CPU is as fast as DeepSpeed's compiled one.
_FUSED = OptimizerKind(("torch.optim", "AdamW"), {"fused": True})


def _bitsandbytes(**arguments: Any) -> OptimizerKind:
    return OptimizerKind(("bitsandbytes.optim", "AdamW"), arguments, ignored=("amsgrad",))


_ADAM_8BIT = _bitsandbytes(optim_bits=8)
KINDS: dict[str, OptimizerKind] = {
    "adamw_torch": _FUSED,
    "adamw_torch_fused": _FUSED,
    "adamw_8bit": _ADAM_8BIT,
    "adamw_bnb_8bit": _ADAM_8BIT,
    "paged_adamw_8bit": _bitsandbytes(optim_bits=8, is_paged=True),
    "paged_adamw_32bit": _bitsandbytes(optim_bits=32, is_paged=True),
    "deepspeed_cpu_adam": OptimizerKind(
        ("deepspeed.ops.adam", "DeepSpeedCPUAdam"), {"adamw_mode": True}, builder="CPUAdamBuilder"
    ),
    "deepspeed_fused_adam": OptimizerKind(
        ("deepspeed.ops.adam", "FusedAdam"), {"adam_w_mode": True}, builder="FusedAdamBuilder"
    ),
    "sgd": OptimizerKind(("torch.optim", "SGD"), {}, adam=False),
}


def missing_to_compile(builder: str, *, cuda: bool) -> str | None:
    """What this machine lacks to compile a DeepSpeed op at run time; None where nothing is, or it came compiled.

    Args:
        builder: DeepSpeed's name of the op's builder.
        cuda: whether it is compiled for a GPU.
    """
    if is_prebuilt(builder):
        return None
    if cuda and builder == "FusedAdamBuilder" and cuda_toolkit() is None:
        return "the CUDA toolkit (nvcc); CUDA_HOME names it"
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "a C++ compiler (Debian: g++); CXX names another"
    return None if cpp_extension.is_ninja_available() else "ninja (pip install ninja)"


def optimizer_kind(options: AlignmentConfig) -> tuple[OptimizerKind, str | None]:
    """The optimizer that ``optim`` names, or where it cannot be compiled torch's, with a sentence that says so."""
    kind = KINDS[options.optim]
    if kind.builder is None:
        return kind, None
    missing = missing_to_compile(kind.builder, cuda=uses_cuda(options))
    if missing is None:
        return kind, None
    return KINDS[_TORCH], (
        f"optim: {options.optim} is compiled at its first use, and this machine lacks {missing}; taking {_TORCH}, "
        "torch's fused AdamW, which makes the same step at about the same speed"
    )
