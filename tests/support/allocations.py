"""Count the bytes of CPU tensors: in use, and their peak in each phase of a run.

Three instruments were compared. A ``TorchDispatchMode`` over live storages does not see what operators allocate
inside, such as workspaces of attention and temporaries of in-place operations, and costs 20 µs per operation.
``torch.profiler`` sees every request of torch's CPU allocator, but only on threads that inherit the profiler's state,
keeps an event for each, and ignores blocks that were allocated before it started and are released later. The third is
an allocator that wraps torch's (``data/counting_allocator.cpp``): it sees every storage of every thread, DeepSpeed's
buffers and autograd's included, costs less than a microsecond per request, has a peak that can be reset as
``torch.cuda.max_memory_allocated`` has, and can refuse requests beyond a limit as a full GPU does. It is used here;
a test compares it with the profiler.

Not counted: buffers of gloo's threads, which NCCL does not have; files that safetensors maps (a checkpoint whose dtype
differs from that of the run is copied while it is loaded, as it is to a GPU); arrays of NumPy, and workspaces of MKL.
Counted, but absent from a GPU: workspaces of oneDNN, and of SDPA's kernel for CPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).resolve().parents[1] / "data" / "counting_allocator.cpp"
COMPILER = os.environ.get("CXX", "c++")


@functools.cache
def library() -> Path:
    """Return the compiled allocator, which is kept for later test sessions with this release of torch."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER}, a C++ compiler, is not installed")
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"alignment-counting-allocator-{os.getuid()}-{key}.so"
    if not target.exists():
        folder, partial = Path(torch.__file__).parent, target.with_suffix(f".{os.getpid()}")
        command = [
            *(COMPILER, "-shared", "-fPIC", "-O1", "-std=c++20", f"-I{folder / 'include'}", str(SOURCE)),
            *("-o", str(partial), f"-L{folder / 'lib'}", "-lc10", f"-Wl,-rpath,{folder / 'lib'}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        partial.replace(target)  # another process may do the same
    return target


class Allocations:
    """Counts the CPU tensors that this process allocates while the counter is active.

    Args:
        compiled: the result of :func:`library`.
        limits: see :meth:`limit`, by phase.

    Attributes:
        peaks: the largest number of bytes in use in each phase, less those in use at :meth:`begin`.
        after: the number of bytes in use at the latest end of each phase, less the same.
    """

    def __init__(self, compiled: Path, limits: Mapping[str, int] | None = None) -> None:
        self._library = ctypes.CDLL(str(compiled))
        for name in ("live_bytes", "peak_bytes", "bytes_at", "blocks_at_refusal"):
            getattr(self._library, name).restype = ctypes.c_size_t
        self._base, self._limits = 0, limits or {}
        self.peaks: dict[str, int] = {}
        self.after: dict[str, int] = {}

    @contextlib.contextmanager
    def active(self) -> Iterator[Allocations]:
        """Count within this context."""
        self._library.count_allocations()
        try:
            yield self
        finally:
            self._library.stop_counting()
            self.limit(None)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Do not count what is allocated within this context."""
        self._library.stop_counting()
        try:
            yield
        finally:
            self._library.count_allocations()

    @property
    def live(self) -> int:
        """Bytes in use, of those allocated within :meth:`active`."""
        return int(self._library.live_bytes())

    @property
    def peak(self) -> int:
        """The largest number of bytes in use since :meth:`reset_peak`."""
        return int(self._library.peak_bytes())

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self._library.reset_peak()

    def begin(self) -> None:
        """Measure phases relative to what is in use now."""
        gc.collect()
        self._base = self.live

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body as part of phase ``name``."""
        self.reset_peak()
        self.limit(self._limits.get(name))
        try:
            yield
        finally:
            self.limit(None)
            self.peaks[name] = max(self.peaks.get(name, 0), self.peak - self._base)
            self.after[name] = self.live - self._base

    def limit(self, total: int | None) -> None:
        """Raise ``torch.OutOfMemoryError`` for a request beyond ``total`` bytes, relative to :meth:`begin`.

        With None, there is no limit.
        """
        self._library.set_limit(ctypes.c_size_t(0 if total is None else self._base + total))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is counted."""
        return bool(self._library.bytes_at(ctypes.c_void_p(tensor.untyped_storage().data_ptr())))

    def refused(self) -> list[int]:
        """Return the sizes of all blocks that were in use when a request was refused, largest first."""
        sizes = (ctypes.c_size_t * int(self._library.blocks_at_refusal(None, ctypes.c_size_t(0))))()
        self._library.blocks_at_refusal(sizes, ctypes.c_size_t(len(sizes)))
        return sorted(sizes, reverse=True)
