"""Run a 16-bit model in fp32 without a second copy of it, by upcasting each layer's weights while it runs.

The outputs of two sets of weights can then be compared on any host to fp32 precision. The 16-bit rounding of every
activation could be larger than the difference of interest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

_NARROW = (torch.bfloat16, torch.float16)


@contextlib.contextmanager
def computing_in_fp32(model: nn.Module) -> Iterator[None]:
    """Compute in fp32 within this context. The weights are bitwise identical afterwards.

    Peak memory is that of the model plus one of its decoder layers (or its embedding) in fp32.
    """
    with contextlib.ExitStack() as hooks:
        for unit in _units(model):
            widened: list[tuple[nn.Parameter, Tensor]] = []

            def widen(module: nn.Module, *_: Any, widened: list[tuple[nn.Parameter, Tensor]] = widened) -> None:
                for parameter in module.parameters():
                    if parameter.dtype in _NARROW:
                        widened.append((parameter, parameter.data))
                        parameter.data = parameter.data.float()

            def restore(module: nn.Module, *_: Any, widened: list[tuple[nn.Parameter, Tensor]] = widened) -> None:
                for parameter, narrow in widened:
                    parameter.data = narrow
                widened.clear()

            hooks.callback(restore, unit)  # if a forward pass failed
            hooks.callback(unit.register_forward_pre_hook(widen).remove)
            hooks.callback(unit.register_forward_hook(restore).remove)
        yield


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules to upcast one at a time: decoder layers, adapted layers and modules with their own weights."""
    for child in module.children():
        own = any(True for _ in child.parameters(recurse=False))
        if own or isinstance(module, nn.ModuleList) or isinstance(child, BaseTunerLayer):
            yield child
        else:
            yield from _units(child)
