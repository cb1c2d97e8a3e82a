"""What ZeRO-3 leaves behind in DeepSpeed's module-level state, and how to take it away.

``destroy`` leaves two references that keep an engine alive for ever: without this, every engine of a process would
stay in memory, its weights, masters and optimizer states with it. Seen with DeepSpeed 0.19.8; both places are looked
up with care, so that a release which mends them changes nothing here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn


def _module_stack() -> list[nn.Module]:
    """The modules that ZeRO-3's hooks believe to be in forward, the innermost last."""
    stack: list[nn.Module] = getattr(parameter_offload, "FWD_MODULE_STACK", [])
    return stack


@contextlib.contextmanager
def balanced_module_stack() -> Iterator[None]:
    """Around a backward pass: a recomputation of activations that stops early enters modules and never leaves them."""
    stack = _module_stack()
    depth = len(stack)
    try:
        yield
    finally:
        del stack[depth:]


def forget_partitioned(module: nn.Module) -> None:
    """Remove what DeepSpeed's module-level state holds of ``module`` and its engine."""
    # The stack of modules in forward: the outermost one is pushed when hooks are set up, and never popped.
    stack = _module_stack()
    own = set(module.modules())
    stack[:] = [entry for entry in stack if entry not in own]
    forget_release_plans()


def forget_release_plans() -> None:
    """Clear what ZeRO-3 remembers of which weights to let go of after which module.

    A cache on a method, which has the coordinator among its keys but not the order of modules that it was made for.
    The next forward fills it again.
    """
    for name, function in vars(PartitionedParameterCoordinator).items():
        if name.endswith("__params_to_release"):
            _clear_cache(function)


def _clear_cache(function: Any) -> None:
    """Clear an ``lru_cache``, also from behind the closures of decorators."""
    if hasattr(function, "cache_clear"):
        function.cache_clear()
    for cell in getattr(function, "__closure__", None) or ():
        _clear_cache(cell.cell_contents)
