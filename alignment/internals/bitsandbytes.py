"""bitsandbytes: what it logs while it is imported, and how it packs 4-bit weights on a CPU."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def hush_missing_kernel() -> None:
    """Silence the warning about an optional kernel for 4-bit layers on CPUs, whether or not bitsandbytes is imported.

    transformers imports bitsandbytes by way of peft, also for models without 4-bit layers. The warning has no other
    switch than the logger of the module that looks for the kernel. Seen with bitsandbytes 0.50.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def keep_packing(layer: Any) -> None:
    """Keep a ``Linear4bit`` from repacking its weight on a CPU with AVX512-BF16.

    It does so in its first forward in evaluation mode without gradients, and from then on no gradient passes through
    it, without a word. No argument controls it. Seen with bitsandbytes 0.50.
    """
    layer.support_avx512bf16_for_cpu = False


def compute_as_in_training(layer: Any) -> None:
    """Let a ``Linear8bitLt`` on a CPU compute in evaluation mode what it computes in training mode.

    On a CPU the two differ: in training the weight is multiplied as floating point, in evaluation the input is rounded
    to 8 bits as well, so that a policy would differ from itself. It goes by ``training``, which nothing else in the
    layer does. Seen with bitsandbytes 0.50.
    """

    def before(module: Any, _: Any) -> None:
        module.train()

    layer.register_forward_pre_hook(before)


def state_buffer(optimizer: Any, master: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros for a state of the shape of ``master``, as the optimizer itself would allocate them at its first step.

    A paged optimizer has memory that the GPU and the host share; its kernels find it by marks on the tensor. The
    method has no documentation. Any other optimizer gets plain memory beside the master. Seen with bitsandbytes 0.50.
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
    """Whether an optimizer keeps its states in memory that leaves the GPU when something else needs the room.

    Small states (below 100000 elements) stay on the GPU all the same. The attribute has no documentation. Seen with
    bitsandbytes 0.50.
    """
    return bool(getattr(optimizer, "is_paged", False))


def counts_in_32_bits(optimizer: Any) -> bool:
    """Whether an optimizer is one of bitsandbytes', whose kernels are told the size of a tensor in 32 bits.

    Of a tensor of 2**31 elements or more they update a part, or none, without a word. The common base class is
    documented, the limit is not: the arguments of the kernels are ``c_int32``. Seen with bitsandbytes 0.50.
    """
    return any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in type(optimizer).__mro__)
