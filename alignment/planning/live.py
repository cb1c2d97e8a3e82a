"""Count the bytes of live tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor

from alignment.internals.torch import storage_key, watching_operations

_tags = ["layers"]


@contextlib.contextmanager
def tagged(tag: str) -> Iterator[None]:
    """Count what is created within this context under ``tag``; ``layers`` outside of any."""
    _tags.append(tag)
    try:
        yield
    finally:
        _tags.pop()


@contextlib.contextmanager
def live_bytes(ignored: Iterable[Tensor] = ()) -> Iterator[LiveBytes]:
    """Count the tensors that are created within this context, except those in ``ignored`` and views of them."""
    live = LiveBytes(ignored)
    with watching_operations(live.count):
        yield live


class LiveBytes:
    """The bytes of live tensors; see :func:`live_bytes`.

    Attributes:
        now: bytes of live tensors.
        peak: their maximum.
        at_peak: bytes at the maximum by tag, see :func:`tagged`.
        before: :attr:`at_peak` of the first part, see :meth:`begin_last_part`; None if there is one part only.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self.now = self.peak = 0
        self.at_peak: Counter[str] = Counter()
        self.before: Counter[str] | None = None
        self._by_tag: Counter[str] = Counter()
        self._known: dict[int, tuple[str, int]] = {storage_key(one): ("", 0) for one in ignored}

    def begin_last_part(self) -> None:
        """Forget the maximum, except in :attr:`before`. Further calls have no effect."""
        if self.before is None:
            self.before, self.peak = self.at_peak, 0

    def keep(self, tag: str, size: int) -> None:
        """Count ``size`` bytes that stay."""
        self.now += size
        self._by_tag[tag] += size
        self._compare()

    def count(self, tensor: Tensor) -> None:
        """Count a tensor until its memory is freed, unless it shares that of another."""
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
