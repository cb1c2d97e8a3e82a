"""Triton: kernels compiled ahead of time for a GPU that is not present, and the memory traffic of the interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass
class Traffic:
    """Bytes read and written by interpreted kernels; masked entries are not counted."""

    read: int = 0
    written: int = 0


@contextlib.contextmanager
def recorded_traffic() -> Iterator[Traffic]:
    """Count the bytes that kernels read and write within this context under Triton's interpreter.

    Every load and store of an interpreted kernel calls one of two methods of the interpreter's builder; Triton has no
    public way to observe them. Seen with triton 3.7.
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
    """Compile a kernel for an NVIDIA GPU that need not be present; return all stages from "ttir" to "cubin".

    ``triton.compile`` is public, but not the source and target objects that it takes. Seen with triton 3.7.

    Args:
        capability: compute capability, such as 75, 80 or 120.
        kernel: a ``triton.jit`` function, decorated while the interpreter was off.
        signature: type of each argument, such as ``*fp32`` or ``i32``; ``constexpr`` for constants.
        constants: values of the constants.
        warps: warps per program.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants))
    options = {"num_warps": warps}
    return dict(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm)
