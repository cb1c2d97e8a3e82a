"""The optimizer state of a training engine: written as fragments, and read with the same or another split.

Every rank writes the master weights and states that it holds, and reads the intervals that it needs from the files of
all ranks: bitwise identical with the same split, and element by element with any other. The model's weights are not in
the fragments; they follow from the master weights, and those that the model's own files contain in the same precision
are read from there. The format of a fragment file is described in :mod:`.fragments`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.checkpoint.fragment_reading import plan_unit, restore_unit
from alignment.checkpoint.fragments import (
    ELEMENTS,
    MASTER,
    SCALAR,
    WHOLE,
    ExportedTensor,
    Fragments,
    Index,
    SavedPiece,
    SavedUnit,
    fragment_file,
)
from alignment.checkpoint.manifest import FileRecord
from alignment.checkpoint.tensors import TensorFile, write_tensors
from alignment.config.errors import CheckpointError
from alignment.engines.collectives import together
from alignment.engines.scoring import PolicyEngine
from alignment.internals.deepspeed_state import (
    Unit,
    inner_optimizer,
    refresh_weights,
    replay_cpu_adam,
    replicates_state,
    state_units,
    whole_shape,
    zero_stage,
)


def trained_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """The names of the trained parameters, in the order of the model; a tied parameter has its first name."""
    return {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}


def optimizer_name(policy: PolicyEngine) -> str:
    """Library and class of the optimizer, such as ``torch.AdamW``."""
    kind = type(inner_optimizer(policy.engine))
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def group_settings(policy: PolicyEngine) -> list[dict[str, Any]]:
    """The settings of the optimizer's parameter groups (rates, decays, betas), as far as JSON supports them."""
    groups = inner_optimizer(policy.engine).param_groups
    return [
        {name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(_plain(value))}
        for group in groups
    ]


def restore_group_settings(policy: PolicyEngine, settings: Sequence[Mapping[str, Any]]) -> None:
    """Restore settings from :func:`group_settings`, also if the groups are split otherwise, with the same decays.

    Raises:
        CheckpointError: the number of groups differs, and not only because they are split otherwise.
    """
    groups = inner_optimizer(policy.engine).param_groups
    if len(groups) != len(settings):
        settings = _split_alike(groups, settings)
    for group, saved in zip(groups, settings, strict=True):
        for name, value in saved.items():
            current = group.get(name)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(current, tuple) else value


def _split_alike(
    groups: Sequence[Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the saved settings of each group: those with its weight decay, if they do not contradict each other."""
    found = {one.get("weight_decay"): one for one in settings}
    decays = {group.get("weight_decay") for group in groups}
    if decays != set(found) or any(one != found[one.get("weight_decay")] for one in settings):
        raise CheckpointError(
            f"the checkpoint has {len(settings)} parameter groups, but the optimizer has {len(groups)}; resume with "
            "the same model and optimizer"
        )
    return [found[group.get("weight_decay")] for group in groups]


def write_fragments(policy: PolicyEngine, folder: Path, exported: Collection[str] = ()) -> dict[str, FileRecord]:
    """Write this rank's fragment file between two steps; return its record by its name.

    Without ZeRO, all ranks have the same state, and only the first one writes a file. ``exported`` are parameters that
    the model's files in the same folder contain in fp32: a unit of only these is written without its master weights.
    Raises OSError, or CheckpointError if the optimizer has a state that cannot be saved.
    """
    rank, ranks = torch.distributed.get_rank(), 1 if replicates_state(policy.engine) else policy.world_size
    if rank >= ranks:
        return {}
    optimizer, names = inner_optimizer(policy.engine), trained_names(policy.scorer.model)
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    units = []
    for number, unit in enumerate(state_units(policy.engine)):
        pieces = _pieces(unit, names)
        shapes |= {names[piece.parameter]: list(whole_shape(piece.parameter)) for piece in unit.pieces}
        kinds, values = {}, {}
        for name, value in optimizer.state.get(unit.master, {}).items():
            if isinstance(value, Tensor):
                kinds[name] = _kind(name, value, unit.master)
                tensors[f"unit-{number}.{name}"] = value
            elif _is_plain(value):
                values[name] = value
            else:
                raise CheckpointError(
                    f"{optimizer_name(policy)}: state {name!r} of type {type(value).__name__} cannot be saved; use "
                    "another optimizer"
                )
        in_model = unit.master.dtype == torch.float32 and all(piece.name in exported for piece in pieces)
        if not in_model:
            tensors[f"unit-{number}.{MASTER}"] = unit.master
        units.append(SavedUnit(unit.group, unit.master.numel(), not in_model, pieces, kinds, values))
    stage, settings = zero_stage(policy.engine), group_settings(policy)
    index = Index(rank, ranks, policy.world_size, stage, optimizer_name(policy), settings, shapes, units)
    name = fragment_file(rank, ranks)
    return {name: write_tensors(folder / name, tensors, index.metadata())}


def read_fragments(policy: PolicyEngine, folder: Path, exported: Mapping[str, ExportedTensor] | None = None) -> None:
    """Restore this rank's master weights and states from the fragments of all ranks, then the weights. Collective.

    If any rank cannot read, every rank raises; if the checkpoint does not match the engine, nothing has been changed.
    Its files have been compared with its manifest. ``exported`` are parameters that the model's files contain in fp32.

    Raises:
        CheckpointError: files are missing or damaged, or do not match this model, optimizer or split.
    """
    optimizer, names = inner_optimizer(policy.engine), trained_names(policy.scorer.model)
    with together():
        fragments = Fragments(folder)
        units = [(unit, _pieces(unit, names)) for unit in state_units(policy.engine)]
        shapes = {name: whole_shape(parameter) for parameter, name in names.items()}
        _check_same(policy, fragments, shapes, (piece.name for _, pieces in units for piece in pieces))
        places = (exported or {}).items()
        files = {file: TensorFile(folder / file) for file in {at.file for _, at in places}}
        weights = {name: (files[at.file], at.key) for name, at in places}
        plans = [plan_unit(fragments, weights, unit, pieces) for unit, pieces in units]
    with together(), torch.no_grad():
        for plan in plans:
            restore_unit(optimizer, plan)
    steps = [int(state["step"]) for state in optimizer.state.values() if isinstance(state.get("step"), int)]
    replay_cpu_adam(optimizer, max(steps, default=0))
    refresh_weights(policy.engine)


def _pieces(unit: Unit, names: Mapping[nn.Parameter, str]) -> tuple[SavedPiece, ...]:
    """The pieces of a unit by the names of their parameters."""
    if any(piece.parameter not in names for piece in unit.pieces):
        raise CheckpointError("the optimizer has parameters that the model does not train; pass only those it does")
    return tuple(SavedPiece(names[piece.parameter], *piece[1:]) for piece in unit.pieces)


def _check_same(policy: PolicyEngine, fragments: Fragments, shapes: Mapping[str, object], own: Iterable[str]) -> None:
    """Refuse fragments of another optimizer, or of other parameters than those that this rank's optimizer trains."""
    before: dict[str, object] = {"the optimizer": fragments.optimizer, **fragments.shapes}
    now = {"the optimizer": optimizer_name(policy), **shapes}
    for name in (*before, *own):
        was, is_now = before.get(name, "not trained"), now.get(name, "not trained")
        if was != is_now:
            raise CheckpointError(
                f"{fragments.folder}: {name} is {was} in the checkpoint, but {is_now} in this run; resume with the "
                "same model, trained parameters and optimizer"
            )


def _kind(name: str, state: Tensor, master: Tensor) -> str:
    if state.ndim == 0 and (master.ndim or name == "step"):
        return SCALAR
    return ELEMENTS if state.is_floating_point() and state.numel() == master.numel() else WHOLE


def _plain(value: Any) -> Any:
    """The number in a tensor of one element, such as a learning rate; anything else unchanged."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    """Whether a value survives a round trip through JSON, except that tuples become lists."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    return value is None or type(value) in (bool, int, float, str)
