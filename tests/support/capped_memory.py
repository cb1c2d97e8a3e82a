"""A CPU that is out of memory above a number of bytes, as a GPU is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from alignment.training.loop import TrainingLoop
from alignment.training.rehearsal import Rehearsal


class CappedMemory(TorchDispatchMode):
    """Counts the bytes of the storages that operators allocate and that are still alive.

    Attributes:
        cap: the limit, above which :class:`torch.OutOfMemoryError` is raised.
        live, peak: bytes that are alive, and the largest number of them since it was reset.
    """

    def __init__(self, cap: float = float("inf")) -> None:
        super().__init__()
        self.cap, self.live, self.peak = cap, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(Tensor, lambda given: self._count(given, new=False), (args, kwargs))
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._count, result)
        return result

    def _count(self, tensor: Tensor, new: bool = True) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if new else 0
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        weakref.finalize(storage, self._free, key, size)
        self.peak = max(self.peak, self.live)
        if self.live > self.cap:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@dataclass
class Peaks:
    """The memory that was used at most: in the rehearsal, and in each step; bytes."""

    rehearsal: int = 0
    steps: list[int] = field(default_factory=list)


@contextlib.contextmanager
def capped(cap: float = float("inf")) -> Iterator[Peaks]:
    """Cap what training allocates after the engines are built; yield what it uses."""
    memory, peaks = CappedMemory(cap), Peaks()
    run, rehearse, update = TrainingLoop.run, Rehearsal.__call__, TrainingLoop._update

    def running(loop: TrainingLoop, *given: Any) -> Any:
        with memory:
            return run(loop, *given)

    def rehearsing(rehearsal: Rehearsal, steps: int) -> None:
        rehearse(rehearsal, steps)
        peaks.rehearsal = memory.peak

    def updating(loop: TrainingLoop, *given: Any) -> Any:
        memory.peak = memory.live
        result = update(loop, *given)
        peaks.steps.append(memory.peak)
        return result

    with (
        mock.patch.object(TrainingLoop, "run", running),
        mock.patch.object(Rehearsal, "__call__", rehearsing),
        mock.patch.object(TrainingLoop, "_update", updating),
    ):
        yield peaks
