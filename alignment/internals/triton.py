"""Triton: kernels compiled ahead of time for a card that is not there; what the interpreter reads and writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass
class Traffic:
    """Bytes that interpreted kernels have read and written; entries that a mask leaves out are not counted."""

    read: int = 0
    written: int = 0


@contextlib.contextmanager
def recorded_traffic() -> Iterator[Traffic]:
    """Count what kernels read and write in this context, where Triton's interpreter runs them.

    Every load and store of an interpreted kernel passes through two methods of the interpreter's builder; Triton has
    no public way to watch them. Seen with triton 3.7.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counted_load(builder: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        found = load(builder, pointers, mask, *more)
        traffic.read += int(mask.data.sum()) * found.data.itemsize
        return found

    def counted_store(builder: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        traffic.written += int(mask.data.sum()) * value.data.itemsize
        return store(builder, pointers, value, mask, *more)

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", counted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", counted_store),
    ):
        yield traffic


def compiled_for(
    capability: int, kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], warps: int
) -> dict[str, Any]:
    """What Triton's compiler makes of a kernel for an NVIDIA card that need not be there, from "ttir" to "cubin".

    ``triton.compile`` is public, the descriptions of source and target that it takes are not. Seen with triton 3.7.

    Args:
        capability: compute capability as in 75, 80, 120.
        kernel: a function under ``triton.jit``, decorated while the interpreter was off.
        signature: type of each argument as in ``*fp32``, ``i32``; ``constexpr`` for constants.
        constants: values of the constants.
        warps: warps of a program.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants))
    options = {"num_warps": warps}
    return dict(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm)
