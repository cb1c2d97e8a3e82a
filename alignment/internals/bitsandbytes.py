"""bitsandbytes: messages on import, and packing of 4-bit weights on a CPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def hush_missing_kernel() -> None:
    """Silence the warning about an optional kernel for 4-bit layers on CPUs, whether or not bitsandbytes is imported.

    transformers imports bitsandbytes through peft, even for models without 4-bit layers. The warning can be silenced
    only through the logger of the module that looks for the kernel. Seen with bitsandbytes 0.50.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def keep_packing(layer: Any) -> None:
    """Prevent a ``Linear4bit`` from repacking its weight on a CPU with AVX512-BF16.

    It does so in its first forward in evaluation mode without gradients, and from then on it silently passes no
    gradient. No argument controls it. Seen with bitsandbytes 0.50.
    """
    layer.support_avx512bf16_for_cpu = False


def compute_as_in_training(layer: Any) -> None:
    """Make a ``Linear8bitLt`` on a CPU compute the same in evaluation mode as in training mode.

    On a CPU the two differ: in training the weight is multiplied in floating point, in evaluation the input is rounded
    to 8 bits as well, so that a policy would differ from itself. The layer decides by ``training``, which it uses for
    nothing else. Seen with bitsandbytes 0.50.
    """

    def before(module: Any, _: Any) -> None:
        module.train()

    layer.register_forward_pre_hook(before)


def state_buffer(optimizer: Any, master: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros for a state with the shape of ``master``, allocated as by the optimizer itself at its first step.

    A paged optimizer uses memory that the GPU and the host share; its kernels find it by attributes of the tensor. The
    method is not documented. Any other optimizer gets plain memory on the master's device. Seen with bitsandbytes
    0.50.
    """
    import torch

    make = getattr(optimizer, "get_state_buffer", None)
    if make is None:
        return torch.zeros_like(master, dtype=dtype)
    buffer: Tensor = make(master, dtype=dtype)
    if getattr(buffer, "is_paged", False):
        torch.cuda.synchronize()  # zeros are written by a kernel, into memory that the host is about to write to
    return buffer


def is_paged(optimizer: Any) -> bool:
    """Whether an optimizer keeps its states in memory that is moved off the GPU when space is needed.

    Small states (below 100000 elements) always stay on the GPU. The attribute is not documented. Seen with
    bitsandbytes 0.50.
    """
    return bool(getattr(optimizer, "is_paged", False))


def stores_8_bits(optimizer: Any) -> bool:
    """Whether an optimizer keeps 8-bit states. The attribute is not documented. Seen with bitsandbytes 0.50."""
    return getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8


def counts_in_32_bits(optimizer: Any) -> bool:
    """Whether an optimizer is one of bitsandbytes', whose kernels receive the size of a tensor in 32 bits.

    They silently update only a part, or nothing, of a tensor with 2**31 or more elements. The common base class is
    documented, but not the limit: the arguments of the kernels are ``c_int32``. Seen with bitsandbytes 0.50.
    """
    return any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in type(optimizer).__mro__)
