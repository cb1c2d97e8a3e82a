"""The memory that operations allocate."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Tracks the peak number of bytes that operations allocate, without those of casts.

    Tensors that are moved from ``cpu`` to ``cpu:0``, which tests use as another device, are copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            cast = args and isinstance(args[0], Tensor) and isinstance(one, Tensor) and args[0].dtype != one.dtype
            if isinstance(one, Tensor) and not cast and not _shares(one, args):
                self.alive[StorageWeakRef(one.untyped_storage())] = one.untyped_storage().nbytes()
        self.alive = {storage: size for storage, size in self.alive.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def _shares(tensor: Tensor, arguments: Any) -> bool:
    """Return whether a tensor is an argument or a view of one."""
    storages = {one.untyped_storage()._cdata for one in tree_leaves(arguments) if isinstance(one, Tensor)}
    return tensor.untyped_storage()._cdata in storages
