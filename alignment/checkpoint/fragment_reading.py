"""Restoring an optimizer's units from fragments: as a unit if the split is the same, by intervals if not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from alignment.checkpoint.fragments import MASTER, SCALAR, WHOLE, Fragments, Interval, SavedPiece, SavedUnit, fill
from alignment.checkpoint.tensors import TensorFile
from alignment.config.errors import CheckpointError
from alignment.internals.bitsandbytes import state_buffer
from alignment.internals.deepspeed_state import Unit


class SavedState(NamedTuple):
    """A state of a unit to be read from one or several files; elements in none of the intervals are zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    intervals: list[Interval]


class UnitPlan(NamedTuple):
    """What a unit is restored from: where its master weights are, and its states by name (scalars have been read)."""

    unit: Unit
    master: list[Interval]
    states: dict[str, Any]


def plan_unit(
    fragments: Fragments,
    exported: Mapping[str, tuple[TensorFile, str]],
    unit: Unit,
    pieces: tuple[SavedPiece, ...],
) -> UnitPlan:
    """Find everything that a unit of this rank, which consists of ``pieces``, needs, without changing it.

    ``exported`` are the model's files and keys of the parameters that they contain in fp32. Raises CheckpointError if
    states fit another split only, or master weights are missing or have another dtype.
    """
    found = [(piece, *part) for piece in pieces for part in fragments.find(piece)]
    same = fragments.units.get((unit.master.numel(), pieces))
    if same is not None and same[0].master:
        master = [same[1].of(MASTER)]
    else:
        master = [_master(fragments, exported, *part) for part in found]
    for file, key, *_ in master:
        if (dtype := file.tensor(key).dtype) != unit.master.dtype:
            raise CheckpointError(
                f"{file.path}: {key} is {dtype}, but this run's master weights are {unit.master.dtype}; resume with "
                "the same number formats"
            )
    states: dict[str, Any] = {}
    for saved, tensors in [part[1:] for part in found] if same is None else [same]:
        for name, kind in {**saved.states, **dict.fromkeys(saved.values, SCALAR)}.items():
            here = tensors.of(name)
            if kind == SCALAR:
                value = saved.values[name] if name in saved.values else here.file.tensor(here.key)
                if name == "step":
                    value = max(value, states.get(name, value))  # parameters without gradients have made fewer steps
                elif value != states.get(name, value):
                    _refuse(fragments, f"different values of {name!r} in tensors to be merged")
                states[name] = value
                continue
            whole = here.file.tensor(here.key)
            if kind == WHOLE:
                if same is None:
                    _refuse(fragments, f"states that cannot be split differently ({name!r})")
                here = here._replace(numel=whole.numel())
            shape = tuple(unit.master.shape if same is None else whole.shape)
            states.setdefault(name, SavedState(shape, whole.dtype, [])).intervals.append(here)
    return UnitPlan(unit, master, states)


def _refuse(fragments: Fragments, what: str) -> NoReturn:
    raise CheckpointError(
        f"{fragments.folder}: {fragments.optimizer} has {what}; resume with {fragments.split}, as saved, or start a "
        "new run from the model"
    )


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
    if file.tensor(key).shape != fragments.shapes[piece.name]:
        raise CheckpointError(f"{file.path}: {key} does not have the shape of {piece.name}; restore the file")
    return tensors._replace(file=file, key=key, start=piece.start + tensors.offset - piece.offset)


def restore_unit(optimizer: Optimizer, plan: UnitPlan) -> None:
    """Set the master weights and the states of a unit of the inner optimizer."""
    fill(plan.unit.master, plan.master)
    states: dict[str, Any] = {}
    for name, saved in plan.states.items():
        if isinstance(saved, SavedState):
            states[name] = _room(optimizer, plan.unit, name, saved.shape, saved.dtype).zero_()
            fill(states[name], saved.intervals)
        elif isinstance(saved, Tensor):
            states[name] = _room(optimizer, plan.unit, name, (), saved.dtype).copy_(saved)
        else:
            states[name] = saved
    if states:
        optimizer.state[plan.unit.master] = states
    else:
        optimizer.state.pop(plan.unit.master, None)


def _room(optimizer: Optimizer, unit: Unit, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a state on the device that the optimizer would use: the existing tensor if it fits."""
    master, group = unit.master, optimizer.param_groups[unit.group]
    present = optimizer.state.get(master, {}).get(name)
    if isinstance(present, Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
        return present
    if shape == tuple(master.shape) and name != "step":
        return state_buffer(optimizer, master, dtype)
    on_host = not shape and not (group.get("fused") or group.get("capturable"))  # as torch's optimizers do
    return torch.empty(shape, dtype=dtype, device="cpu" if on_host else master.device)
