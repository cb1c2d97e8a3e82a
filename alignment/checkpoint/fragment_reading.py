"""Restoring an optimizer's units from fragments: as a unit if the split is the same, by intervals if not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from alignment.checkpoint.fragments import MASTER, SCALAR, WHOLE, Fragments, Interval, SavedPiece, SavedUnit, fill
from alignment.checkpoint.tensors import TensorFile
from alignment.config.errors import CheckpointError
from alignment.internals.bitsandbytes import state_buffer
from alignment.internals.deepspeed_state import Unit

_VALUE = "value"  # a state that is not a tensor


class SavedState(NamedTuple):
    """A state of a unit to be read from one or several files; elements in none of the intervals are zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    intervals: list[Interval]


class UnitPlan(NamedTuple):
    """Everything that a unit is restored from.

    Attributes:
        unit: the unit.
        master: where its master weights are.
        states: its states by name: tensors to be read, and scalars, which are tensors or plain values.
    """

    unit: Unit
    master: list[Interval]
    states: dict[str, Any]


def plan_unit(
    fragments: Fragments,
    exported: Mapping[str, tuple[TensorFile, str]],
    unit: Unit,
    pieces: tuple[SavedPiece, ...],
) -> UnitPlan:
    """Find everything that a unit needs, without changing it; only scalars are read.

    Args:
        fragments: the opened fragments of the checkpoint.
        exported: the model's files and keys of the parameters that they contain in fp32.
        unit: a unit of this rank.
        pieces: its pieces, by name.

    Raises:
        CheckpointError: states fit another split only, or master weights are missing or have another dtype.
    """
    found = [(piece, *part) for piece in pieces for part in fragments.find(piece)]
    same = fragments.units.get((unit.master.numel(), pieces))
    if same is not None and same[0].master:
        master = [same[1].of(MASTER)]
    else:
        master = [_master(fragments, exported, *part) for part in found]
    for file, key, *_ in master:
        if file.entry(key).dtype != unit.master.dtype:
            raise CheckpointError(
                f"{file.path}: {key} is {file.entry(key).dtype}, but this run's master weights are "
                f"{unit.master.dtype}; resume with the same number formats"
            )
    if same is not None:
        return UnitPlan(unit, master, _states(fragments, [same], None))
    return UnitPlan(unit, master, _states(fragments, [part[1:] for part in found], tuple(unit.master.shape)))


def restore_unit(optimizer: Optimizer, plan: UnitPlan) -> None:
    """Set the master weights and the states of a unit of the inner optimizer.

    Raises:
        CheckpointError: a file cannot be read.
    """
    fill(plan.unit.master, plan.master)
    states: dict[str, Any] = {}
    for name, saved in plan.states.items():
        if isinstance(saved, SavedState):
            states[name] = _room(optimizer, plan.unit, name, saved.shape, saved.dtype, scalar=False).zero_()
            fill(states[name], saved.intervals)
        elif isinstance(saved, Tensor):
            states[name] = _room(optimizer, plan.unit, name, (), saved.dtype, scalar=True).copy_(saved)
        else:
            states[name] = saved
    if states:
        optimizer.state[plan.unit.master] = states
    else:
        optimizer.state.pop(plan.unit.master, None)


def _master(
    fragments: Fragments,
    exported: Mapping[str, tuple[TensorFile, str]],
    piece: SavedPiece,
    unit: SavedUnit,
    tensors: Interval,
) -> Interval:
    """Where the master weights of a part of a saved unit are: in the unit's file, or else in the model's."""
    if unit.master:
        return tensors.of(MASTER)
    if piece.name not in exported:
        raise CheckpointError(
            f"{fragments.folder}: the fp32 weights of {piece.name} are in neither the optimizer's nor the model's "
            "files; restore the model's files"
        )
    file, key = exported[piece.name]
    if file.entry(key).shape != fragments.shapes[piece.name]:
        raise CheckpointError(f"{file.path}: {key} does not have the shape of {piece.name}; restore the file")
    return tensors._replace(file=file, key=key, start=piece.start + tensors.offset - piece.offset)


def _states(
    fragments: Fragments, parts: Iterable[tuple[SavedUnit, Interval]], shape: tuple[int, ...] | None
) -> dict[str, Any]:
    """The states of a unit that consists of parts of saved units.

    Args:
        fragments: the opened fragments.
        parts: the saved units and the parts.
        shape: shape of the unit; None for a saved unit as it is, whose states have shapes of their own.

    Raises:
        CheckpointError: states cannot be divided or merged.
    """
    states: dict[str, Any] = {}
    where = f"{fragments.folder}: {fragments.optimizer}"
    before = f"resume with {fragments.split}, as saved, or start a new run from the model"
    for unit, tensors in parts:
        for name, kind in {**unit.states, **dict.fromkeys(unit.values, _VALUE)}.items():
            part = tensors.of(name)
            if kind in (SCALAR, _VALUE):
                value = part.file.read(part.key) if kind == SCALAR else unit.values[name]
                if name == "step":
                    value = max(value, states.get(name, value))  # parameters without gradients have made fewer steps
                elif value != states.get(name, value):
                    raise CheckpointError(
                        f"{where} has different values of {name!r} in tensors to be merged; {before}"
                    )
                states[name] = value
                continue
            entry = part.file.entry(part.key)
            if kind == WHOLE:
                if shape is not None:
                    raise CheckpointError(f"{where} has states that cannot be split differently ({name!r}); {before}")
                part = part._replace(numel=math.prod(entry.shape))
            state = states.setdefault(name, SavedState(entry.shape if shape is None else shape, entry.dtype, []))
            state.intervals.append(part)
    return states


def _room(
    optimizer: Optimizer, unit: Unit, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, scalar: bool
) -> Tensor:
    """Memory for a state on the device that the optimizer would use: the existing tensor if it fits."""
    master = unit.master
    present = optimizer.state.get(master, {}).get(name)
    if isinstance(present, Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
        return present
    if scalar:
        group = optimizer.param_groups[unit.group]
        on_device = group.get("fused") or group.get("capturable")
        return torch.empty(shape, dtype=dtype, device=master.device if on_device else "cpu")
    if shape == tuple(master.shape):
        return state_buffer(optimizer, master, dtype)
    return torch.empty(shape, dtype=dtype, device=master.device)
