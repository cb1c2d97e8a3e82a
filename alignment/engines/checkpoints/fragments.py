"""Optimizer fragments as files, without a model or an engine: their index, what to check, and the masters in them.

A fragment file is one rank's: safetensors with the tensors of its units (``unit-3.master``, ``unit-3.exp_avg``) and an
index in the metadata, which says what parameters a unit stands for. A unit is one tensor that the optimizer steps on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alignment.config.errors import CheckpointError
from alignment.engines.checkpoints.tensors import TensorFile

FORMAT = 1
MASTER = "master"
ELEMENTS, SCALAR, WHOLE = "elements", "scalar", "whole"  # kinds of state; see SavedUnit
_INDEX = "fragments"
_NAME = re.compile(r"optimizer-(\d{5,})-of-(\d{5,})\.safetensors")


class SavedPiece(NamedTuple):
    """``numel`` elements of the flattened parameter ``name`` from ``start`` on, at ``offset`` of the unit."""

    name: str
    start: int
    offset: int
    numel: int


class SavedUnit(NamedTuple):
    """One unit of a file.

    Attributes:
        group: number of its parameter group.
        numel: elements, padding included.
        master: whether its master is in the file; otherwise the model's files have it.
        pieces: what it stands for.
        states: the kind of each tensor: ``elements`` has one value for each element of the unit, ``scalar`` is 0-dim,
            and ``whole`` is anything else, which means something for the unit as it is only.
        values: states that are no tensors.
    """

    group: int
    numel: int
    master: bool
    pieces: tuple[SavedPiece, ...]
    states: dict[str, str]
    values: dict[str, Any]

    @property
    def fits_only_itself(self) -> bool:
        """Whether its states cannot be cut into pieces."""
        return WHOLE in self.states.values()


class Index(NamedTuple):
    """What a file says of itself.

    Attributes:
        rank: number of the file, from 0.
        ranks: how many files there are.
        world_size: how many ranks trained.
        stage: their ZeRO stage.
        optimizer: library and class.
        groups: settings of the parameter groups.
        shapes: of the parameters that have a piece in the file, by name.
        units: in the order of their numbers.
    """

    rank: int
    ranks: int
    world_size: int
    stage: int
    optimizer: str
    groups: list[dict[str, Any]]
    shapes: dict[str, list[int]]
    units: list[SavedUnit]

    @property
    def split(self) -> str:
        """Stage and ranks, in words."""
        return describe_split(self.stage, self.world_size)

    def metadata(self) -> dict[str, str]:
        """The index as metadata of the file."""
        content = {"format": FORMAT, **self._asdict(), "units": [unit._asdict() for unit in self.units]}
        return {"format": "pt", _INDEX: json.dumps(content, separators=(",", ":"))}


def describe_split(stage: int, world_size: int) -> str:
    """``ZeRO stage 2 on 4 ranks``."""
    return f"ZeRO stage {stage} on {world_size} rank{'s' if world_size > 1 else ''}"


def fragment_file(rank: int, ranks: int) -> str:
    """The name of a rank's file, such as ``optimizer-00001-of-00002.safetensors`` for rank 0."""
    return f"optimizer-{rank + 1:05}-of-{ranks:05}.safetensors"


def fragment_files(folder: Path, ranks: int | None = None) -> list[str]:
    """The names of all fragment files that a checkpoint has to have.

    Args:
        folder: the checkpoint.
        ranks: how many there are; None: as the names in the folder say.

    Raises:
        CheckpointError: one is missing, or the folder has those of several splits.
    """
    found = {entry.name: _NAME.fullmatch(entry.name) for entry in folder.iterdir()} if folder.is_dir() else {}
    counts = {int(match[2]) for match in found.values() if match} if ranks is None else {ranks}
    if not counts:
        raise CheckpointError(
            f"{folder}: has no optimizer state (optimizer-*.safetensors); give it as the model of a new run instead"
        )
    if len(counts) > 1:
        raise CheckpointError(
            f"{folder}: has optimizer files of different numbers of ranks ({', '.join(map(str, sorted(counts)))}); "
            "remove those that do not belong to it"
        )
    count = counts.pop()
    names = [fragment_file(rank, count) for rank in range(count)]
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: is missing; restore the file, or use another checkpoint")
    return names


def state_key(unit: int, state: str) -> str:
    """The name of a unit's tensor in the file."""
    return f"unit-{unit}.{state}"


class FragmentFile:
    """A fragment file opened for reading, its index checked against its tensors.

    Args:
        path: of the file.

    Attributes:
        tensors: the file.
        index: what it says of itself.

    Raises:
        CheckpointError: it is damaged, no fragment file, or of a newer format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = TensorFile(path)
        try:
            self.index = self._read_index()
            self._check_units()
        except BaseException:
            self.tensors.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self.tensors.close()

    def _read_index(self) -> Index:
        text = self.tensors.metadata.get(_INDEX)
        if text is None:
            raise CheckpointError(f"{self.path}: its metadata has no index {_INDEX!r}: it is no optimizer fragment")
        try:
            content = json.loads(text)
            version = content.pop("format")
            if type(version) is int and version > FORMAT:
                raise CheckpointError(
                    f"{self.path}: format {version} is newer than {FORMAT}, the newest that this release reads; "
                    "install the release that wrote it"
                )
            units = [
                SavedUnit(**{**unit, "pieces": tuple(SavedPiece(*piece) for piece in unit["pieces"])})
                for unit in content.pop("units")
            ]
            return Index(**content, units=units)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.path}: its index cannot be read ({error}); restore the file") from error

    def _check_units(self) -> None:
        """Every tensor of the index is there, no other is, and each has its size."""
        wanted: set[str] = set()
        for number, unit in enumerate(self.index.units):
            kinds = unit.states | ({MASTER: ELEMENTS} if unit.master else {})
            for state, kind in kinds.items():
                key = state_key(number, state)
                wanted.add(key)
                if key not in self.tensors:
                    raise CheckpointError(f"{self.path}: {key} is missing; restore the file")
                held = math.prod(self.tensors.shape(key))
                if (kind == ELEMENTS and held != unit.numel) or (kind == SCALAR and held != 1):
                    raise CheckpointError(f"{self.path}: {key} has {held} elements; restore the file")
            for piece in unit.pieces:
                size = math.prod(self.index.shapes.get(piece.name, [0]))
                if piece.offset + piece.numel > unit.numel or piece.start + piece.numel > size:
                    raise CheckpointError(f"{self.path}: the piece of {piece.name} does not fit; restore the file")
        for key in self.tensors.keys():
            if key not in wanted:
                raise CheckpointError(f"{self.path}: {key} is not in its index; restore the file")


class Held(NamedTuple):
    """A piece and where it is."""

    file: FragmentFile
    number: int
    unit: SavedUnit
    piece: SavedPiece


class Fragments:
    """All fragment files of a checkpoint, opened together and checked against each other; a context manager.

    Args:
        folder: the checkpoint.
        files: names of all of them; None: as the folder has them.

    Attributes:
        files: the files, in the order of their ranks.
        shapes: of all parameters, by name.

    Raises:
        CheckpointError: a file is missing, damaged, of a newer format or of another checkpoint, or the pieces of a
            parameter do not cover it.
    """

    def __init__(self, folder: Path, files: Sequence[str] | None = None) -> None:
        self.folder = folder
        self.files: list[FragmentFile] = []
        self._held: dict[str, list[Held]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        with ExitStack() as opened:
            for name in fragment_files(folder) if files is None else files:
                self.files.append(FragmentFile(folder / name))
                opened.callback(self.files[-1].close)
            self.files.sort(key=lambda file: file.index.rank)
            self._check_ranks()
            self._collect()
            self._check_coverage()
            self._opened = opened.pop_all()

    def __enter__(self) -> Fragments:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def first(self) -> Index:
        """The index of the first file, for what all of them share."""
        return self.files[0].index

    def overlapping(self, name: str, start: int, numel: int) -> Iterator[tuple[Held, int, int]]:
        """What holds the elements of a flattened parameter from ``start`` on.

        Yields:
            A piece, the first of its elements that is wanted (in the parameter), and how many are.
        """
        at, end = start, start + numel
        for held in self._held[name]:
            last = min(held.piece.start + held.piece.numel, end)
            if held.piece.start <= at < last:
                yield held, at, last - at
                at = last

    def pieces(self, name: str) -> list[Held]:
        """All pieces of a parameter, in order."""
        return self._held[name]

    def _check_ranks(self) -> None:
        first = self.first
        for rank, file in enumerate(self.files):
            index = file.index
            if (index.rank, index.ranks) != (rank, len(self.files)):
                raise CheckpointError(
                    f"{file.path}: is number {index.rank + 1} of {index.ranks} but was given as number {rank + 1} of "
                    f"{len(self.files)}; restore the files of one checkpoint"
                )
            if (index.split, index.optimizer) != (first.split, first.optimizer):
                raise CheckpointError(
                    f"{file.path}: is of {index.optimizer} at {index.split}, but {self.files[0].path.name} is of "
                    f"{first.optimizer} at {first.split}; restore the files of one checkpoint"
                )

    def _collect(self) -> None:
        for file in self.files:
            for name, shape in file.index.shapes.items():
                if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                    raise CheckpointError(f"{file.path}: {name} has the shape {shape}, elsewhere {self.shapes[name]}")
            for number, unit in enumerate(file.index.units):
                for piece in unit.pieces:
                    self._held.setdefault(piece.name, []).append(Held(file, number, unit, piece))
        for pieces in self._held.values():
            pieces.sort(key=lambda held: held.piece.start)

    def _check_coverage(self) -> None:
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            found = sum(numel for _, _, numel in self.overlapping(name, 0, size)) if name in self._held else 0
            if found != size:
                raise CheckpointError(
                    f"{self.folder}: has {found} of the {size} elements of {name}; restore its files"
                )


def check_fragments(folder: Path, ranks: int | None = None) -> None:
    """Check names, headers and indices of all fragment files of a checkpoint; no tensor is read.

    Args:
        folder: the checkpoint.
        ranks: how many files there have to be; None: as their names say.

    Raises:
        CheckpointError: a file is missing, truncated, of a newer format, or does not belong to the others.
    """
    with Fragments(folder, fragment_files(folder, ranks)):
        pass


def master_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's masters by parameter name, whole and one at a time, in the order of the names.

    Parameters whose masters are not in the fragments, because the model's files hold the same values, are left out.

    Raises:
        CheckpointError: as :func:`check_fragments`.
    """
    with Fragments(folder) as fragments:
        for name in sorted(fragments.shapes):
            pieces = fragments.pieces(name)
            if not all(held.unit.master for held in pieces):
                continue
            dtype = pieces[0].file.tensors.dtype(state_key(pieces[0].number, MASTER))
            whole = torch.empty(fragments.shapes[name], dtype=dtype, device="cpu")
            flat = whole.view(-1)
            for held, start, numel in fragments.overlapping(name, 0, flat.numel()):
                read_piece(held, MASTER, flat[start : start + numel], start)
            yield name, whole


def read_piece(held: Held, state: str, target: Tensor, start: int) -> None:
    """Fill ``target`` with elements of a state, from element ``start`` of the flattened parameter on."""
    position = held.piece.offset + start - held.piece.start
    held.file.tensors.read_into(state_key(held.number, state), target, position)
