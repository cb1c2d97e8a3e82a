"""Optimizer fragments as files, without a model or an engine: their index, and which of them have which elements.

Each rank writes one fragment file: safetensors with the tensors of its units (``unit-3.master``, ``unit-3.exp_avg``)
and an index in the metadata that maps units to parameters. A unit is one tensor that the optimizer updates.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignment.checkpoint.tensors import TensorFile
from alignment.config.errors import CheckpointError, counted

MASTER = "master"
ELEMENTS, SCALAR, WHOLE = "elements", "scalar", "whole"  # kinds of state; see SavedUnit
_INDEX = "fragments"


class ExportedTensor(NamedTuple):
    """Location of a parameter in fp32, with the same shape, in the model's own files: file name and key."""

    file: str
    key: str


class SavedPiece(NamedTuple):
    """``numel`` elements of the flattened parameter ``name``, from ``start``, at ``offset`` in the unit."""

    name: str
    start: int
    offset: int
    numel: int


class SavedUnit(NamedTuple):
    """One unit of a file.

    The kind of a state is ``elements`` with one value for each element of the unit, ``scalar`` if it is 0-dim, and
    ``whole`` for anything else, which is meaningful only for the unit as it is.
    """

    group: int  #: number of its parameter group
    numel: int  #: number of elements, including padding
    master: bool  #: whether its master weights are in the file; otherwise they are in the model's files
    pieces: tuple[SavedPiece, ...]  #: the parts of parameters that it consists of
    states: dict[str, str]  #: the kind of each tensor
    values: dict[str, Any]  #: states that are not tensors


class Index(NamedTuple):
    """The index of a file."""

    rank: int  #: number of the file, from 0
    ranks: int  #: number of files
    world_size: int  #: of the run
    stage: int  #: ZeRO stage of the run
    optimizer: str  #: library and class
    groups: list[dict[str, Any]]  #: settings of the parameter groups
    shapes: dict[str, list[int]]  #: shapes of the parameters with a piece in the file, by name
    units: list[SavedUnit]  #: in the order of their numbers

    def metadata(self) -> dict[str, str]:
        """Serialize the index as metadata of the file."""
        content = {"format": 1, **self._asdict(), "units": [unit._asdict() for unit in self.units]}
        return {"format": "pt", _INDEX: json.dumps(content, separators=(",", ":"))}

    @classmethod
    def of(cls, file: TensorFile) -> Index:
        """Read the index of a fragment file."""
        content = json.loads(file.metadata[_INDEX])
        del content["format"]  # that of the manifest has been compared
        pieces = [tuple(SavedPiece(*piece) for piece in unit["pieces"]) for unit in content["units"]]
        units = [SavedUnit(**{**unit, "pieces": of}) for unit, of in zip(content["units"], pieces, strict=True)]
        return cls(**{**content, "units": units})


def describe_split(stage: int, world_size: int) -> str:
    """Describe a split, such as ``ZeRO stage 2 on 4 ranks``."""
    return f"ZeRO stage {stage} on {counted(world_size, 'rank')}"


def fragment_file(rank: int, ranks: int) -> str:
    """The name of a rank's file, such as ``optimizer-00001-of-00002.safetensors`` for rank 0."""
    return f"optimizer-{rank + 1:05}-of-{ranks:05}.safetensors"


class Interval(NamedTuple):
    """Consecutive elements of a flattened tensor in a file, and where they belong."""

    file: TensorFile
    key: str  #: the tensor's name; without the name of a state, such as ``unit-3``, the tensors of a unit
    start: int  #: first element in the tensor
    offset: int  #: first element in the target
    numel: int

    def of(self, state: str) -> Interval:
        """For the tensors of a unit: the same elements of its master weights, or of a state."""
        return self._replace(key=f"{self.key}.{state}")


def fill(target: Tensor, intervals: Iterable[Interval]) -> None:
    """Fill a tensor of any shape; elements in none of the intervals are not changed.

    Raises CheckpointError if a file does not have these elements in the dtype of the tensor.
    """
    flat = target.detach().contiguous().view(-1)  # a copy only if the tensor is not contiguous
    for file, key, start, offset, numel in intervals:
        file.read_into(key, flat[offset : offset + numel], start)
    if flat.data_ptr() != target.data_ptr():
        target.detach().copy_(flat.view(target.shape))


class Fragments:
    """All fragment files of a checkpoint: optimizer, split, shapes of parameters, and units by size and pieces.

    Raises:
        CheckpointError: a file is missing, damaged or of another checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = [TensorFile(path) for path in sorted(folder.glob("optimizer-*-of-*.safetensors"))]
        indices = [Index.of(file) for file in files]
        shared = {index[1:5] for index in indices}  # numbers of files and ranks, stage, and optimizer
        if len(shared) != 1 or [index.rank for index in indices] != list(range(indices[0].ranks)):
            raise CheckpointError(
                f"{folder}: requires the optimizer's files of one checkpoint, but has "
                f"{', '.join(file.path.name for file in files) or 'none'}; restore its files, and remove all others"
            )
        self.optimizer = indices[0].optimizer
        self.split = describe_split(indices[0].stage, indices[0].world_size)
        self.shapes = {name: tuple(shape) for index in indices for name, shape in index.shapes.items()}
        self.units = {
            (unit.numel, unit.pieces): (unit, Interval(file, f"unit-{number}", 0, 0, unit.numel))
            for file, index in zip(files, indices, strict=True)
            for number, unit in enumerate(index.units)
        }
        pieces = [(piece, *found) for found in self.units.values() for piece in found[0].pieces]
        self._pieces: dict[str, list[tuple[SavedPiece, SavedUnit, Interval]]] = {name: [] for name in self.shapes}
        for found in sorted(pieces, key=lambda found: found[0].start):
            self._pieces[found[0].name].append(found)

    def find(self, piece: SavedPiece) -> list[tuple[SavedUnit, Interval]]:
        """The units that have the elements of a piece, and where; offsets are those in the piece's own unit.

        Raises CheckpointError if the files do not have all of its elements.
        """
        found, at, end = [], piece.start, piece.start + piece.numel
        for saved, unit, tensors in self._pieces[piece.name]:
            last = min(saved.start + saved.numel, end)
            if saved.start <= at < last:
                start, offset = saved.offset + at - saved.start, piece.offset + at - piece.start
                found.append((unit, tensors._replace(start=start, offset=offset, numel=last - at)))
                at = last
        if at != end:
            raise CheckpointError(f"{self.folder}: element {at} of {piece.name} is missing; restore its files")
        return found


def master_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's master weights by parameter name, unsharded and one at a time, in the order of the names.

    Those that are not in the fragments, because the model's files have the same values, are skipped. Raises
    CheckpointError if a file is missing or damaged.
    """
    fragments = Fragments(folder)
    for name, shape in sorted(fragments.shapes.items()):
        found = fragments.find(SavedPiece(name, 0, 0, math.prod(shape)))
        if all(unit.master for unit, _ in found):
            intervals = [tensors.of(MASTER) for _, tensors in found]
            whole = torch.empty(shape, dtype=intervals[0].file.tensor(intervals[0].key).dtype, device="cpu")
            fill(whole, intervals)
            yield name, whole
