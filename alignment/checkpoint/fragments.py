"""Optimizer fragments as files, without a model or an engine: index, checks, and master weights.

Each rank writes one fragment file: safetensors with the tensors of its units (``unit-3.master``, ``unit-3.exp_avg``)
and an index in the metadata that maps units to parameters. A unit is one tensor that the optimizer updates.
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

from alignment.checkpoint.tensors import TensorFile
from alignment.config.errors import CheckpointError, counted

FORMAT = 1
MASTER = "master"
ELEMENTS, SCALAR, WHOLE = "elements", "scalar", "whole"  # kinds of state; see SavedUnit
_INDEX = "fragments"
_NAME = re.compile(r"optimizer-(\d{5,})-of-(\d{5,})\.safetensors")


class SavedPiece(NamedTuple):
    """``numel`` elements of the flattened parameter ``name``, from ``start``, at ``offset`` in the unit."""

    name: str
    start: int
    offset: int
    numel: int


class SavedUnit(NamedTuple):
    """One unit of a file.

    Attributes:
        group: number of its parameter group.
        numel: number of elements, including padding.
        master: whether its master weights are in the file; otherwise they are in the model's files.
        pieces: the parts of parameters that it consists of.
        states: the kind of each tensor: ``elements`` has one value for each element of the unit, ``scalar`` is 0-dim,
            and ``whole`` is anything else, which is meaningful only for the unit as it is.
        values: states that are not tensors.
    """

    group: int
    numel: int
    master: bool
    pieces: tuple[SavedPiece, ...]
    states: dict[str, str]
    values: dict[str, Any]

    @property
    def fits_only_itself(self) -> bool:
        """Whether its states cannot be split."""
        return WHOLE in self.states.values()


class Index(NamedTuple):
    """The index of a file.

    Attributes:
        rank: number of the file, from 0.
        ranks: number of files.
        world_size: number of ranks of the run.
        stage: ZeRO stage.
        optimizer: library and class.
        groups: settings of the parameter groups.
        shapes: shapes of the parameters with a piece in the file, by name.
        units: units in the order of their numbers.
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
        """Stage and ranks, as text."""
        return describe_split(self.stage, self.world_size)

    def metadata(self) -> dict[str, str]:
        """Serialize the index as metadata of the file."""
        content = {"format": FORMAT, **self._asdict(), "units": [unit._asdict() for unit in self.units]}
        return {"format": "pt", _INDEX: json.dumps(content, separators=(",", ":"))}


def describe_split(stage: int, world_size: int) -> str:
    """Describe a split, such as ``ZeRO stage 2 on 4 ranks``."""
    return f"ZeRO stage {stage} on {counted(world_size, 'rank')}"


def fragment_file(rank: int, ranks: int) -> str:
    """The name of a rank's file, such as ``optimizer-00001-of-00002.safetensors`` for rank 0."""
    return f"optimizer-{rank + 1:05}-of-{ranks:05}.safetensors"


def fragment_files(folder: Path, ranks: int | None = None) -> list[str]:
    """The names of all fragment files of a checkpoint.

    Args:
        folder: the checkpoint.
        ranks: number of files; None: as given by the names in the folder.

    Raises:
        CheckpointError: a file is missing, or the folder has files of several splits.
    """
    found = {entry.name: _NAME.fullmatch(entry.name) for entry in folder.iterdir()} if folder.is_dir() else {}
    counts = {int(match[2]) for match in found.values() if match} if ranks is None else {ranks}
    if not counts:
        raise CheckpointError(
            f"{folder}: no optimizer state (optimizer-*.safetensors); use it as the model of a new run instead"
        )
    if len(counts) > 1:
        raise CheckpointError(
            f"{folder}: optimizer files of different numbers of ranks ({', '.join(map(str, sorted(counts)))}); "
            "remove those that do not belong to this checkpoint"
        )
    count = counts.pop()
    names = [fragment_file(rank, count) for rank in range(count)]
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing; restore the file, or use another checkpoint")
    return names


def state_key(unit: int, state: str) -> str:
    """The name of a unit's tensor in the file."""
    return f"unit-{unit}.{state}"


class FragmentFile:
    """A fragment file opened for reading, with its index checked against its tensors.

    Args:
        path: the file.

    Attributes:
        tensors: the tensors of the file.
        index: its index.

    Raises:
        CheckpointError: the file is damaged, not a fragment file, or of a newer format.
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
            raise CheckpointError(f"{self.path}: not an optimizer fragment, because its metadata has no {_INDEX!r}")
        try:
            content = json.loads(text)
            version = content.pop("format")
            if type(version) is int and version > FORMAT:
                raise CheckpointError(
                    f"{self.path}: format {version} is newer than {FORMAT}, the newest that this release can read; "
                    "upgrade deepspeed-alignment"
                )
            units = [
                SavedUnit(**{**unit, "pieces": tuple(SavedPiece(*piece) for piece in unit["pieces"])})
                for unit in content.pop("units")
            ]
            return Index(**content, units=units)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.path}: the index cannot be read ({error}); restore the file") from error

    def _check_units(self) -> None:
        """Check that the file contains exactly the tensors of the index, with their sizes."""
        wanted: set[str] = set()
        for number, unit in enumerate(self.index.units):
            kinds = unit.states | ({MASTER: ELEMENTS} if unit.master else {})
            for state, kind in kinds.items():
                key = state_key(number, state)
                wanted.add(key)
                if key not in self.tensors:
                    raise CheckpointError(f"{self.path}: tensor {key} is missing; restore the file")
                held = math.prod(self.tensors.shape(key))
                if (kind == ELEMENTS and held != unit.numel) or (kind == SCALAR and held != 1):
                    raise CheckpointError(
                        f"{self.path}: tensor {key} has the wrong size ({held} elements); restore the file"
                    )
            for piece in unit.pieces:
                size = math.prod(self.index.shapes.get(piece.name, [0]))
                if piece.offset + piece.numel > unit.numel or piece.start + piece.numel > size:
                    raise CheckpointError(
                        f"{self.path}: the piece of {piece.name} does not fit its unit or parameter; restore the file"
                    )
        for key in self.tensors.keys():
            if key not in wanted:
                raise CheckpointError(f"{self.path}: tensor {key} is not in the index; restore the file")


class Held(NamedTuple):
    """A piece and its location."""

    file: FragmentFile
    number: int
    unit: SavedUnit
    piece: SavedPiece


class Fragments:
    """All fragment files of a checkpoint, opened together and checked for consistency; a context manager.

    Args:
        folder: the checkpoint.
        files: names of all files; None: as found in the folder.

    Attributes:
        files: the files, in the order of their ranks.
        shapes: shapes of all parameters, by name.

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
        """The index of the first file, for properties that all files share."""
        return self.files[0].index

    def overlapping(self, name: str, start: int, numel: int) -> Iterator[tuple[Held, int, int]]:
        """The pieces that contain ``numel`` elements of a flattened parameter from ``start``.

        Yields:
            A piece, its first requested element (in the parameter), and the number of requested elements.
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
                    f"{file.path}: is file {index.rank + 1} of {index.ranks}, not {rank + 1} of {len(self.files)} as "
                    "expected; restore the files of one checkpoint"
                )
            if (index.split, index.optimizer) != (first.split, first.optimizer):
                raise CheckpointError(
                    f"{file.path}: was saved by {index.optimizer} with {index.split}, but {self.files[0].path.name} "
                    f"by {first.optimizer} with {first.split}; restore the files of one checkpoint"
                )

    def _collect(self) -> None:
        for file in self.files:
            for name, shape in file.index.shapes.items():
                if self.shapes.setdefault(name, tuple(shape)) != tuple(shape):
                    raise CheckpointError(
                        f"{file.path}: {name} has shape {shape}, but {list(self.shapes[name])} in another file; "
                        "restore the files of one checkpoint"
                    )
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
                    f"{self.folder}: contains only {found} of the {size} elements of {name}; restore its files"
                )


def check_fragments(folder: Path, ranks: int | None = None) -> None:
    """Check names, headers and indices of all fragment files of a checkpoint without reading tensors.

    Args:
        folder: the checkpoint.
        ranks: expected number of files; None: as given by their names.

    Raises:
        CheckpointError: a file is missing, truncated, of a newer format, or does not belong to the others.
    """
    with Fragments(folder, fragment_files(folder, ranks)):
        pass


def master_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's master weights by parameter name, unsharded and one at a time, in the order of the names.

    Parameters whose master weights are not in the fragments, because the model's files have the same values, are
    skipped.

    Raises:
        CheckpointError: as for :func:`check_fragments`.
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
    """Fill ``target`` with elements of a state, beginning at element ``start`` of the flattened parameter."""
    position = held.piece.offset + start - held.piece.start
    held.file.tensors.read_into(state_key(held.number, state), target, position)
