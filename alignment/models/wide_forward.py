"""Running a 16-bit model in fp32 without a second copy of it: a layer's weights are widened while it runs.

What two sets of weights compute is compared to fp32 rounding that way, on any host, and not to the 16-bit rounding of
every activation, which is larger than many a difference that matters.
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
    """Within this context the model computes in fp32; its weights are bitwise the same afterwards.

    Peak memory is the model and one of its decoder layers (or its embedding) in fp32.
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

            hooks.callback(restore, unit)  # where a forward failed
            hooks.callback(unit.register_forward_pre_hook(widen).remove)
            hooks.callback(unit.register_forward_hook(restore).remove)
        yield


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """What is widened at once: an element of a list of layers, an adapted layer, or a module with its own weights."""
    for child in module.children():
        own = any(True for _ in child.parameters(recurse=False))
        if own or isinstance(module, nn.ModuleList) or isinstance(child, BaseTunerLayer):
            yield child
        else:
            yield from _units(child)
