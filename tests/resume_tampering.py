"""Checkpoints in which one piece of state is missing or stale, with manifests that match.

Pieces are discovered, not listed, so that state added later is included.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from alignment.checkpoint.manifest import Manifest, record_of

_FILES = ("run_state", "optimizer", "frozen", "model")


class Piece(NamedTuple):
    """A piece of state, and how it is damaged.

    Attributes:
        file: file of the checkpoint.
        path: keys in a JSON file, or the suffix of tensor names; empty for the file itself.
        left_out: whether it is removed; otherwise it is replaced with the value of an older checkpoint.
    """

    file: str
    path: tuple[str, ...] = ()
    left_out: bool = False

    def __str__(self) -> str:
        return f"{self.file}: {'.'.join(self.path) or 'all'}{' left out' if self.left_out else ''}"


def pieces(older: Path, checkpoint: Path) -> list[Piece]:
    """Return every piece of a checkpoint that can be removed, or that differs from the older checkpoint."""
    found: list[Piece] = []
    for file in sorted(path.name for path in checkpoint.iterdir() if path.name.startswith(_FILES)):
        if file.endswith(".json"):
            now, before = _json(checkpoint / file), _json(older / file)
            found += [Piece(file, (name,), left_out=True) for name in now]
            found += [Piece(file, path) for path in _paths(now) if _at(now, path) != _at(before, path)]
        elif file.startswith("optimizer"):
            kinds = sorted({name.rpartition(".")[2] for name in load_file(checkpoint / file)})
            found += [Piece(file, (kind,)) for kind in kinds]
        else:
            found.append(Piece(file))
            found += [Piece(file, left_out=True)] if file.startswith("frozen") else []
    return found


def tamper(piece: Piece, older: Path, checkpoint: Path) -> None:
    """Damage a checkpoint so that only its content shows it."""
    manifest, path = Manifest.read(checkpoint), checkpoint / piece.file
    if not piece.path:
        path.unlink() if piece.left_out else shutil.copyfile(older / piece.file, path)
    elif piece.file.endswith(".json"):
        state = _json(path)
        _replace(state, piece.path, None if piece.left_out else _at(_json(older / piece.file), piece.path))
        path.write_text(json.dumps(state))
    else:
        _make_stale(piece.path[0], older / piece.file, path)
    manifest.files.pop(piece.file)
    if path.exists():
        manifest.files[piece.file] = record_of(path)
    manifest.write(checkpoint)


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _paths(state: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return names, and the names nested in them."""
    found: list[tuple[str, ...]] = []
    for name, value in state.items():
        found += [(name, inner) for inner in value] if isinstance(value, dict) and value else [(name,)]
    return found


def _at(state: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path, or None."""
    for name in path:
        state = state.get(name) if isinstance(state, dict) else None
    return state


def _replace(state: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set the value at a path; None removes it."""
    for name in path[:-1]:
        state = state[name]
    state[path[-1]] = value
    if value is None:
        del state[path[-1]]


def _make_stale(kind: str, older: Path, path: Path) -> None:
    """Replace all tensors of a kind with the values of another file."""
    before = load_file(older)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(f".{kind}")]:
        assert not torch.equal(tensors[name], before[name]), f"{name}: nothing has changed"
        tensors[name] = before[name]
    save_file(tensors, path, metadata)
