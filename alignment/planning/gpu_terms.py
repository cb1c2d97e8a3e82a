"""What only a GPU allocates, each with the source of its figure. Not confirmed by a measurement on a GPU."""

from __future__ import annotations

from torch import Tensor

# Share of a card's nominal memory that a process can use: 23.8e9 bytes of "24 GB".
_USABLE = 23.8 / 24
# CUDA context, cuBLAS workspaces and the kernels of torch: about 0.5 GB on Ampere and later, by nvidia-smi.
CONTEXT = 600 * 10**6
# Buffers of NCCL per communicator: up to 32 channels with 4 MB each (NCCL_BUFFSIZE), in both directions.
NCCL = 256 * 10**6
# Host memory of a process: Python, torch with CUDA's libraries, DeepSpeed and transformers, by ps on Linux.
HOST_PROCESS = 3 * 10**9
# Share that is added to each peak: fragmentation of the caching allocator, and errors of the plan.
RESERVE = 0.05


def usable_bytes(gigabytes: float) -> float:
    """Bytes that a process can use of a GPU that is sold as having this many GB."""
    return gigabytes * 1e9 * _USABLE


def attention_backward(kernel: str, query: Tensor, key: Tensor) -> int:
    """Bytes of the temporaries of a fused attention's backward pass.

    In flash attention of torch 2.13 (``flash_bwd``), the gradient of the queries is accumulated in fp32, with a head
    size rounded up to 32, and there is one value per token and head; with grouped queries, the gradients of keys and
    values are computed per query head before they are summed.
    """
    batch, heads, tokens, size = query.shape
    if kernel == "cpu":
        return 0
    if kernel == "efficient":  # one value per token and head; fp32 gradients of the queries if they are 16-bit
        return batch * heads * tokens * (4 + (4 * size if query.element_size() == 2 else 0))
    rounded = -(-size // 32) * 32
    total = batch * heads * tokens * (4 * rounded + 4)
    if key.shape[1] != heads:
        total += 2 * batch * heads * key.shape[2] * size * query.element_size()
    return total


def page_locked(size: float) -> int:
    """Bytes that a block of page-locked memory takes: torch's allocator rounds up to a power of two."""
    return 0 if size < 1 else 1 << (int(size) - 1).bit_length()
