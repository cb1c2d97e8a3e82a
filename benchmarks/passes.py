"""Count how often the head passes over a tile of logits, by element-wise operations and reductions.

One pass is a read or a write of as many bytes as the fp32 tile has. Matrix products and operations on one entry per
row are excluded. On a GPU, these passes are the head's cost in addition to its matrix products. They are counted from
a CPU trace of the code that runs on a GPU, where products take 16-bit factors (:func:`products_as_on_a_gpu`); memory
accesses of the kernels are counted in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.internals.triton import recorded_traffic
from alignment.models.logprobs import token_logprobs
from alignment.models.tiles import products
from alignment.models.tiles.choice import VARIABLE
from alignment.models.tiles.products import LogitTransform

ROWS, WIDTH, VOCABULARY = 16, 8, 6000  # one tile; three vocabulary slices in the backward pass
_PRODUCTS = {"mm", "addmm", "addmm_", "bmm"}
_OF_AN_ENTRY = {"gather", "scatter_", "scatter_add_"}
_ONLY_WRITE = {"copy_", "zero_", "fill_"}  # do not read their output
_ONLY_ALLOCATE = {"empty_like", "empty", "new_empty", "new_zeros"}


class Passes(NamedTuple):
    """Passes over a tile in its forward and backward pass."""

    forward: float
    backward: float


class TileTraffic(TorchDispatchMode):
    """Sums the bytes that operations read from and write to tiles of ``rows`` rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.bytes, self.counting = rows, 0, True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if self.counting and not func.is_view and name not in _PRODUCTS | _OF_AN_ENTRY | _ONLY_ALLOCATE:
            read = [*(args[1:] if name in _ONLY_WRITE else args), *(v for k, v in kwargs.items() if k != "out")]
            written = result if isinstance(result, (tuple, list)) else (result,)
            self.bytes += sum(self._size(value) for value in [*read, *written])
        return result

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause counting within this context."""
        self.counting = False
        try:
            yield
        finally:
            self.counting = True

    def _size(self, value: Any) -> int:
        if not isinstance(value, Tensor) or value.ndim != 2 or self.rows not in value.shape or max(value.shape) < 256:
            return 0
        return value.numel() * value.element_size()


@contextlib.contextmanager
def products_as_on_a_gpu(traffic: TileTraffic | None = None) -> Iterator[None]:
    """Compute products of 16-bit matrices as cuBLAS does: 16-bit factors, with sums and results in fp32."""

    def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        assert left.dtype == right.dtype and left.dtype.itemsize == 2, "no other product uses this function"
        with traffic.paused() if traffic is not None else contextlib.nullcontext():
            return left.to(dtype) @ right.to(dtype)

    with (
        mock.patch.object(products, "sums_wider", lambda factor: True),
        mock.patch.object(products, "mixed_product", product),
    ):
        yield


def passes(way: str, dtype: torch.dtype, stats: bool = True, transform: LogitTransform = LogitTransform()) -> Passes:  # noqa: B008
    """Return the head's passes over a tile if hidden states and weight require gradients.

    Args:
        way: ``torch`` or ``triton``, which requires Triton's interpreter (``TRITON_INTERPRET=1``).
        dtype: dtype of hidden states and weight.
        stats: also compute statistics of each token's distribution.
        transform: scale and soft cap.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    traffic, tile = TileTraffic(ROWS), 4 * ROWS * VOCABULARY
    of_kernels = _launches_counted(traffic) if way == "triton" else contextlib.nullcontext()
    with mock.patch.dict(os.environ, {VARIABLE: way}), products_as_on_a_gpu(traffic), of_kernels, traffic:
        logps, _ = token_logprobs(hidden, weight, None, targets, transform, stats=stats)
        forward = traffic.bytes
        logps.sum().backward()
    return Passes(forward / tile, (traffic.bytes - forward) / tile)


@contextlib.contextmanager
def _launches_counted(traffic: TileTraffic) -> Iterator[None]:
    """Count the memory accesses of kernels, without the copies that the interpreter makes around a launch."""
    from alignment.models.tiles import fused

    def counted(launch: Callable[..., Any]) -> Callable[..., Any]:
        def launched(*args: Any, **kwargs: Any) -> Any:
            with traffic.paused(), recorded_traffic() as own:
                result = launch(*args, **kwargs)
            traffic.bytes += own.read + own.written
            return result

        return launched

    with (
        mock.patch.object(fused, "measure", counted(fused.measure)),
        mock.patch.object(fused, "differentiate", counted(fused.differentiate)),
    ):
        yield
