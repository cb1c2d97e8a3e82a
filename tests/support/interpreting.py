"""Patch Triton's interpreter for Liger's kernels. ``import interpreting`` before any module that imports triton.

In compiled code, a float argument is an fp32 scalar, and ``libdevice`` has CUDA functions. The interpreter of triton
3.7 uses Python floats and has no ``libdevice``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

_convert = interpreter._implicit_cvt


def _tensor(values: Any, kind: Any) -> Any:
    return tl.tensor(interpreter.TensorHandle(values, kind.scalar), kind)


def _converted(argument: Any) -> Any:
    return _tensor(np.array([argument], np.float32), tl.float32) if isinstance(argument, float) else _convert(argument)


def _elementwise(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: _tensor(function(x.handle.data).astype(x.handle.data.dtype), x.type)


interpreter._implicit_cvt = _converted
libdevice.tanh = _elementwise(np.tanh)
libdevice.rsqrt = _elementwise(lambda values: 1 / np.sqrt(values))
