"""Identification of a folder to export without loading it: an adapter or a full model, and whether it is complete."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignment.checkpoint.fragments import master_weights
from alignment.checkpoint.manifest import MANIFEST, Manifest
from alignment.config.errors import CheckpointError, ModelError, first_line, listing

_OPTIMIZER = "optimizer-*.safetensors"
_ADAPTER, _INDEX, _WEIGHTS = "adapter_config.json", "model.safetensors.index.json", "model.safetensors"
_DEEPSPEED = ("zero_to_fp32.py", "global_step*", "*_model_states.pt", "*_optim_states.pt")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a full model on disk, read one at a time.

    Attributes:
        files: file of each tensor, by the tensor's name in it.
        dtype: dtype of most weights.
    """

    files: Mapping[str, Path]
    dtype: torch.dtype

    def get(self, name: str, shape: Iterable[int]) -> Tensor | None:
        """Read a tensor; return None if there is none of this name and shape."""
        if name not in self.files:
            return None
        with safe_open(self.files[name], framework="pt") as opened:
            if tuple(opened.get_slice(name).get_shape()) != tuple(shape):
                return None
            tensor: Tensor = opened.get_tensor(name)
            return tensor


def is_adapter(path: Path) -> bool:
    """Whether ``path`` is an adapter (True) or a full model (False).

    Raises:
        ModelError: it is neither, or both.
    """
    if not path.exists():
        raise ModelError(f"{path}: no such folder; pass a checkpoint, or the folder of a model or an adapter")
    if not path.is_dir():
        raise ModelError(f"{path} is a file; pass a checkpoint, or the folder of a model or an adapter")
    if path.name.startswith(".") and path.name.endswith(".partial"):
        raise ModelError(f"{path} is an unfinished checkpoint; pass a complete one")
    adapter = (path / _ADAPTER).is_file()
    weights = (path / _WEIGHTS).is_file() or (path / _INDEX).is_file()
    if adapter and weights:
        raise ModelError(
            f"{path} contains an adapter ({_ADAPTER}) and a full model ({_WEIGHTS}); move one to another folder"
        )
    if not adapter and not (weights and (path / "config.json").is_file()):
        raise ModelError(_neither(path))
    return adapter


def _neither(path: Path) -> str:
    inner = sorted({file.parent.name for name in (_ADAPTER, "config.json") for file in path.glob(f"[!.]*/{name}")})
    if any(next(path.glob(pattern), None) for pattern in _DEEPSPEED):
        return (
            f"{path} is a checkpoint in DeepSpeed's format, whose pickle files are not read; convert it to a Hugging "
            "Face folder with its zero_to_fp32.py"
        )
    if inner:
        return f"{path} is neither a model nor an adapter; pass one of those in it: {listing(inner)}"
    if next(path.glob("pytorch_model*.bin"), None):
        return f"{path}: pickled weights (pytorch_model.bin) are not read; save them as {_WEIGHTS}"
    if (path / "config.json").is_file():
        return f"{path} has a config.json but no weights ({_WEIGHTS}); copy or download it again"
    return f"{path} is neither a model (config.json, {_WEIGHTS}) nor an adapter ({_ADAPTER})"


def check_manifest(path: Path) -> Manifest | None:
    """Compare a checkpoint's files with its manifest; return None for a folder without one.

    Sizes are checked for all files, checksums for the files that every export reads; those of the optimizer's files,
    which are several times as large, are checked by :func:`checked_masters`.

    Raises:
        CheckpointError: a file is missing or has changed since it was written, or the manifest is damaged.
    """
    if not (path / MANIFEST).is_file():
        if next(path.glob(_OPTIMIZER), None):
            raise CheckpointError(
                f"{path / MANIFEST} is missing, so the checkpoint is not complete; pass another checkpoint"
            )
        return None
    manifest = Manifest.read(path)
    manifest.check_files(path)
    manifest.check_contents(path, [name for name in manifest.files if not Path(name).match(_OPTIMIZER)])
    return manifest


def checked_masters(path: Path, manifest: Manifest | None) -> Iterator[tuple[str, Tensor]]:
    """The fp32 master weights of a checkpoint by parameter name, one at a time; empty if it has none.

    Raises:
        CheckpointError: an optimizer's file has changed since it was written.
    """
    names = [name for name in (manifest.files if manifest else ()) if Path(name).match(_OPTIMIZER)]
    if manifest is None or not names:
        return iter(())
    manifest.check_contents(path, names)
    return ((name, master) for name, master in master_weights(path) if master.dtype == torch.float32)


def weight_files(path: Path) -> WeightFiles:
    """The tensors of a full model, from the headers of its files alone.

    Raises:
        ModelError: a file is missing or damaged, or the dtype of the weights cannot be exported.
    """
    try:
        names = {_WEIGHTS}
        if (path / _INDEX).is_file():
            names = set(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path / _INDEX} cannot be read ({first_line(error)}); copy it again") from error
    files: dict[str, Path] = {}
    elements: Counter[str] = Counter()
    for name in sorted(names):
        for key, dtype, count in _header(path / name):
            files[key] = path / name
            elements[dtype] += count
    return WeightFiles(files, _most(elements, path))


def file_dtype(file: Path) -> torch.dtype:
    """The dtype of most weights of a file; errors as for :func:`weight_files`."""
    elements: Counter[str] = Counter()
    for _, dtype, count in _header(file):
        elements[dtype] += count
    return _most(elements, file)


def _header(file: Path) -> Iterator[tuple[str, str, int]]:
    """Name, dtype and number of elements of every tensor of a file."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                yield name, part.get_dtype(), torch.Size(part.get_shape()).numel()
    except FileNotFoundError as error:
        raise ModelError(f"{file} is missing; copy or download it again") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged ({first_line(error)}); copy or download it again") from error


def _most(elements: Counter[str], where: Path) -> torch.dtype:
    most = elements.most_common(1)[0][0] if elements else "missing"
    if most not in _DTYPES:
        raise ModelError(f"{where}: the weights are {most}; only {', '.join(_DTYPES)} can be exported")
    return _DTYPES[most]
