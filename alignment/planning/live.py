"""Count the bytes of live tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from alignment.internals.torch import storage_key

_tags = ["layers"]


@contextlib.contextmanager
def tagged(tag: str) -> Iterator[None]:
    """Count what is created within this context under ``tag``."""
    _tags.append(tag)
    try:
        yield
    finally:
        _tags.pop()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are created within this context.

    Attributes:
        now: bytes of live tensors.
        peak: their maximum.
        at_peak: bytes at the maximum by tag, see :func:`tagged`.
        before: :attr:`at_peak` of the first part, see :meth:`begin_last_part`; None if there is one part only.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        """Neither the storages of the tensors in ``ignored`` nor views of them are counted."""
        super().__init__()
        self.now = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.before: Counter[str] | None = None
        self._by_tag: Counter[str] = Counter()
        self._known: dict[int, tuple[str, int]] = {storage_key(one): ("", 0) for one in ignored}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_iter(output):
            if isinstance(value, Tensor):
                self._count(value)
        return output

    def begin_last_part(self) -> None:
        """Forget the maximum, except in :attr:`before`. Further calls have no effect."""
        if self.before is None:
            self.before, self.peak = self.at_peak, 0

    def keep(self, tag: str, size: int) -> None:
        """Count ``size`` bytes that stay."""
        self.now += size
        self._by_tag[tag] += size
        self._compare()

    def _count(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        tag, size = self._known[key] = (_tags[-1], storage.nbytes())
        self.now += size
        self._by_tag[tag] += size
        self._compare()
        weakref.finalize(storage, self._freed, key)

    def _compare(self) -> None:
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, self._by_tag.copy()

    def _freed(self, key: int) -> None:
        tag, size = self._known.pop(key)
        self.now -= size
        self._by_tag[tag] -= size
