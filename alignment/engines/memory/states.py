"""The size of optimizer states that are not allocated yet, because they are created at the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from alignment.internals.bitsandbytes import is_paged
from alignment.internals.deepspeed_state import Unit, inner_optimizer, state_units
from alignment.internals.torch import first_states

_SMALL = 8192  # elements; 8-bit optimizers keep 32-bit states for tensors below 4096


def bytes_to_come(engine: Any, device: torch.device) -> int:
    """Bytes that this rank's optimizer will allocate on ``device`` at its first step; 0 after it.

    Master weights in host memory have their states there, so an offloaded optimizer uses no GPU memory. Neither does a
    paged one: its pages leave the GPU when memory is needed.

    Args:
        engine: DeepSpeed engine, with or without an optimizer.
        device: device of interest.
    """
    if engine.optimizer is None or not hasattr(engine.optimizer, "param_groups"):
        return 0  # an inference engine
    optimizer = inner_optimizer(engine)
    if device.type == "cuda" and is_paged(optimizer):
        return 0
    units = [unit for unit in absent_units(engine) if unit.master.device.type == device.type]
    return first_state_bytes(optimizer, units)


def absent_units(engine: Any) -> Iterator[Unit]:
    """The units of this rank without optimizer state."""
    optimizer = inner_optimizer(engine)
    return (unit for unit in state_units(engine) if not optimizer.state.get(unit.master))


def first_state_bytes(optimizer: Optimizer, units: list[Unit]) -> int:
    """The size of the states that an optimizer creates for units at its first step; it is not modified.

    Extrapolated from the states of small tensors to the size of the master weights.
    """
    known: dict[tuple[object, ...], int] = {}

    def first_bytes(unit: Unit, numel: int) -> int:
        key = (unit.group, unit.master.dtype, numel)
        if key not in known:
            known[key] = _first_bytes(optimizer, unit, numel)
        return known[key]

    size = 0
    for unit in units:
        numel = unit.master.numel()
        if numel <= 2 * _SMALL:
            size += first_bytes(unit, numel)
        else:
            less, more = first_bytes(unit, _SMALL), first_bytes(unit, 2 * _SMALL)
            size += less + (more - less) * (numel - _SMALL) // _SMALL
    return size


def _first_bytes(optimizer: Optimizer, unit: Unit, numel: int) -> int:
    """The size of the states for ``numel`` elements; that of two moments if it cannot be determined."""
    try:
        states = first_states(optimizer, unit.group, unit.master.new_zeros(numel))
    except Exception:  # a user's optimizer may accept matrices only and raise any error
        return 2 * numel * unit.master.element_size()
    return sum(value.nbytes for value in states.values() if isinstance(value, Tensor))
