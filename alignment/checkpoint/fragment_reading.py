"""Filling an optimizer's units from fragments: as a unit if the split is the same, by intervals if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from alignment.checkpoint.fragments import (
    ELEMENTS,
    MASTER,
    SCALAR,
    FragmentFile,
    Fragments,
    Held,
    SavedPiece,
    SavedUnit,
    read_piece,
    state_key,
)
from alignment.checkpoint.tensors import TensorFile
from alignment.config.errors import CheckpointError
from alignment.internals.bitsandbytes import state_buffer
from alignment.internals.deepspeed_state import Unit


class ExportedTensor(NamedTuple):
    """Location of a parameter in fp32, with the same shape, in the model's own files: file name and key."""

    file: str
    key: str


class FragmentReader:
    """Fills units; a context manager that closes the model files that it has opened.

    Args:
        fragments: the opened fragments of the checkpoint.
        exported: parameters that the model's files contain in fp32.
        optimizer: the inner optimizer.
        split: this run's stage and ranks, for messages.
    """

    def __init__(
        self, fragments: Fragments, exported: Mapping[str, ExportedTensor], optimizer: Optimizer, split: str
    ) -> None:
        self.fragments, self.exported, self.optimizer, self.split = fragments, exported, optimizer, split
        self._models: dict[str, TensorFile] = {}
        self._opened = ExitStack()
        self._same: dict[tuple[int, tuple[SavedPiece, ...]], tuple[FragmentFile, int, SavedUnit]] = {}
        for file in fragments.files:
            for number, unit in enumerate(file.index.units):
                self._same.setdefault((unit.numel, unit.pieces), (file, number, unit))

    def __enter__(self) -> FragmentReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def check(self, unit: Unit, pieces: Sequence[SavedPiece], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the checkpoint contains everything that a unit needs, without changing or reading tensors.

        Args:
            unit: a unit of this rank.
            pieces: its pieces, by name.
            shapes: shapes of the model's parameters.

        Raises:
            CheckpointError: a parameter is missing or has another shape, states fit another split only, or a master
                weight is in neither the fragments nor the model's files.
        """
        folder = self.fragments.folder
        for piece in pieces:
            saved, own = self.fragments.shapes.get(piece.name), shapes[piece.name]
            if saved != own:
                found = "is not in the checkpoint" if saved is None else f"has shape {list(saved)} in the checkpoint"
                raise CheckpointError(
                    f"{folder}: {piece.name} {found}, but {list(own)} in this run; resume with the same model and the "
                    "same trained parameters"
                )
        same = (unit.master.numel(), tuple(pieces)) in self._same
        for held in self._sources(pieces):
            if held.unit.fits_only_itself and not same:
                first = self.fragments.first
                raise CheckpointError(
                    f"{folder}: the states of {first.optimizer} were saved with {first.split} and cannot be "
                    f"repartitioned, but this run uses {self.split}; resume with the stage and number of ranks of the "
                    "checkpoint, or start a new run from the model"
                )
            self._check_master(held, unit.master.dtype)
        if not same:
            self._merged(pieces)

    def fill(self, unit: Unit, pieces: Sequence[SavedPiece]) -> None:
        """Set the master weights and the states of a unit that :meth:`check` accepted.

        Raises:
            CheckpointError: a file cannot be read.
        """
        same = self._same.get((unit.master.numel(), tuple(pieces)))
        if same is None:
            self._fill_master(unit, pieces)
            self._fill_pieces(unit, pieces)
            return
        file, number, saved = same
        if saved.master:
            file.tensors.read_into(state_key(number, MASTER), unit.master)
        else:
            self._fill_master(unit, pieces)
        states: dict[str, Any] = {}
        for name, kind in saved.states.items():
            key = state_key(number, name)
            states[name] = self._room(unit, name, kind, file.tensors.shape(key), file.tensors.dtype(key))
            file.tensors.read_into(key, states[name])
        self._set(unit, states | saved.values)

    def _sources(self, pieces: Sequence[SavedPiece]) -> list[Held]:
        """The units of the checkpoint that contain the elements of these pieces, each once."""
        found: dict[tuple[int, int], Held] = {}
        for piece in pieces:
            for held, _, _ in self.fragments.overlapping(piece.name, piece.start, piece.numel):
                found.setdefault((held.file.index.rank, held.number), held)
        return list(found.values())

    def _check_master(self, held: Held, dtype: torch.dtype) -> None:
        if held.unit.master:
            key, file, where = state_key(held.number, MASTER), held.file.tensors, held.file.path
        else:
            file, key = self._exported(held.piece.name)
            where = file.path
            shape = self.fragments.shapes[held.piece.name]
            if file.shape(key) != shape:
                raise CheckpointError(f"{where}: {key} has shape {list(file.shape(key))} instead of {list(shape)}")
        if file.dtype(key) != dtype:
            raise CheckpointError(
                f"{where}: {key} is {_short(file.dtype(key))}, but this run's master weights are {_short(dtype)}; "
                "resume with the same number formats"
            )

    def _exported(self, name: str) -> tuple[TensorFile, str]:
        """The model's file that contains a parameter, and the parameter's key in it."""
        if name not in self.exported:
            raise CheckpointError(
                f"{self.fragments.folder}: the fp32 weights of {name} are in neither the optimizer's nor the model's "
                "files; restore the model's files"
            )
        file, key = self.exported[name]
        if file not in self._models:
            self._models[file] = TensorFile(self.fragments.folder / file)
            self._opened.callback(self._models[file].close)
        return self._models[file], key

    def _fill_master(self, unit: Unit, pieces: Sequence[SavedPiece]) -> None:
        """Fill the master weights by intervals; padding is not changed."""
        for piece in pieces:
            for held, start, numel in self.fragments.overlapping(piece.name, piece.start, piece.numel):
                with _elements(unit.master, piece.offset + start - piece.start, numel) as target:
                    if held.unit.master:
                        read_piece(held, MASTER, target, start)
                    else:
                        file, key = self._exported(piece.name)
                        file.read_into(key, target, start)

    def _fill_pieces(self, unit: Unit, pieces: Sequence[SavedPiece]) -> None:
        """Fill the states by intervals; elements missing in the checkpoint, including padding, are set to zero."""
        states, scalars = self._merged(pieces)
        for name, dtype in states.items():
            room = self._room(unit, name, ELEMENTS, tuple(unit.master.shape), dtype).zero_()
            for piece in pieces:
                for held, start, numel in self.fragments.overlapping(piece.name, piece.start, piece.numel):
                    if name in held.unit.states:
                        with _elements(room, piece.offset + start - piece.start, numel) as target:
                            read_piece(held, name, target, start)
            states[name] = room
        for name, value in scalars.items():
            if isinstance(value, Tensor):
                scalars[name] = self._room(unit, name, SCALAR, (), value.dtype).copy_(value)
        self._set(unit, states | scalars)

    def _merged(self, pieces: Sequence[SavedPiece]) -> tuple[dict[str, Any], dict[str, Any]]:
        """For a unit assembled from several others: the dtype of each element-wise state, and the scalar values.

        Raises:
            CheckpointError: the values of the merged units differ.
        """
        elements: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for held in self._sources(pieces):
            tensors, own = held.file.tensors, dict(held.unit.values)
            for name, kind in held.unit.states.items():
                key = state_key(held.number, name)
                if kind == SCALAR:
                    own[name] = tensors.read(key).reshape(())
                else:
                    elements.setdefault(name, tensors.dtype(key))
            for name, value in own.items():
                before = values.setdefault(name, value)
                if name == "step":
                    values[name] = max(before, value)  # tensors without gradients are not counted in a separate unit
                elif before != value:
                    raise CheckpointError(
                        f"{self.fragments.folder}: {self.fragments.first.optimizer} stores {name!r} per tensor, but "
                        f"{self.split} would merge tensors with different values; resume with "
                        f"{self.fragments.first.split}"
                    )
        return elements, values

    def _room(self, unit: Unit, name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a state on the device that the optimizer would use: the existing tensor if it fits."""
        master = unit.master
        present = self.optimizer.state.get(master, {}).get(name)
        if isinstance(present, Tensor) and tuple(present.shape) == shape and present.dtype == dtype:
            return present
        if kind == SCALAR:
            group = self.optimizer.param_groups[unit.group]
            on_device = group.get("fused") or group.get("capturable")
            return torch.empty(shape, dtype=dtype, device=master.device if on_device else "cpu")
        if shape == tuple(master.shape):
            return state_buffer(self.optimizer, master, dtype)
        return torch.empty(shape, dtype=dtype, device=master.device)

    def _set(self, unit: Unit, states: dict[str, Any]) -> None:
        if states:
            self.optimizer.state[unit.master] = states
        else:
            self.optimizer.state.pop(unit.master, None)


class _elements:
    """A range of a flattened tensor to be filled; written back at the end if it had to be copied."""

    def __init__(self, tensor: Tensor, offset: int, numel: int) -> None:
        self._tensor, self._range = tensor.detach(), slice(offset, offset + numel)

    def __enter__(self) -> Tensor:
        self._flat = self._tensor.reshape(-1)
        return self._flat[self._range]

    def __exit__(self, *_: object) -> None:
        if self._flat.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self._flat.view(self._tensor.shape))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
