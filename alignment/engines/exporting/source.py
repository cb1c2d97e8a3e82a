"""What a folder to export is, found without loading anything: an adapter or a full model, and whether it is whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from alignment.config.errors import ModelError, first_line, listing

MANIFEST = "manifest.json"
_OPTIMIZER = "optimizer-*.safetensors"
_ADAPTER, _INDEX, _WEIGHTS = "adapter_config.json", "model.safetensors.index.json", "model.safetensors"
_DEEPSPEED = ("zero_to_fp32.py", "global_step*", "*_model_states.pt", "*_optim_states.pt")
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_CHUNK = 2**24


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a full model on disk, which are read one at a time.

    Attributes:
        files: the file of each tensor, by the tensor's name in it.
        dtype: that of most weights.
    """

    files: Mapping[str, Path]
    dtype: torch.dtype

    def get(self, name: str, shape: Iterable[int]) -> Tensor | None:
        """One tensor; None where there is none of this name and shape."""
        if name not in self.files:
            return None
        with safe_open(self.files[name], framework="pt") as opened:
            if tuple(opened.get_slice(name).get_shape()) != tuple(shape):
                return None
            tensor: Tensor = opened.get_tensor(name)
            return tensor


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's manifest says, and the checksums in it; empty for a folder that has none."""

    content: Mapping[str, Any] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)

    def check(self, path: Path, names: Iterable[str]) -> None:
        """Read files and compare their checksums.

        Raises:
            ModelError: one is not what was written.
        """
        for name in names:
            if _checksum(path / name) != self.checksums[name]:
                raise ModelError(
                    f"{path / name} is not what was written ({MANIFEST} has another checksum): the checkpoint is "
                    "damaged; give another"
                )

    def section(self, name: str) -> Mapping[str, Any]:
        """One of its mappings, such as ``options``."""
        found = self.content.get(name)
        return found if isinstance(found, dict) else {}


def is_adapter(path: Path) -> bool:
    """Whether ``path`` is an adapter (True) or a full model (False).

    Raises:
        ModelError: it is neither, or both.
    """
    if not path.exists():
        raise ModelError(f"{path}: no such folder; give a checkpoint, a model's folder or an adapter's")
    if not path.is_dir():
        raise ModelError(f"{path} is a file; give a checkpoint, a model's folder or an adapter's")
    if path.name.startswith(".") and path.name.endswith(".partial"):
        raise ModelError(f"{path} is a checkpoint that was not finished; give a whole one")
    adapter = (path / _ADAPTER).is_file()
    weights = (path / _WEIGHTS).is_file() or (path / _INDEX).is_file()
    if adapter and weights:
        raise ModelError(f"{path} holds an adapter ({_ADAPTER}) and a full model ({_WEIGHTS}); move one of them away")
    if not adapter and not (weights and (path / "config.json").is_file()):
        raise ModelError(_neither(path))
    return adapter


def _neither(path: Path) -> str:
    inner = sorted({file.parent.name for name in (_ADAPTER, "config.json") for file in path.glob(f"[!.]*/{name}")})
    if any(next(path.glob(pattern), None) for pattern in _DEEPSPEED):
        return (
            f"{path} is a checkpoint of DeepSpeed's own format, whose pickles are not read; write a Hugging Face "
            "folder from it with its zero_to_fp32.py"
        )
    if inner:
        return f"{path} is neither a model nor an adapter; there are some in it: {listing(inner)}"
    if next(path.glob("pytorch_model*.bin"), None):
        return f"{path}: its weights are a pickle (pytorch_model.bin), which is not read; save them as {_WEIGHTS}"
    if (path / "config.json").is_file():
        return f"{path} has a config.json and no weights ({_WEIGHTS}); copy or download it again"
    return f"{path} is neither a model (config.json, {_WEIGHTS}) nor an adapter ({_ADAPTER})"


def check_manifest(path: Path) -> Manifest:
    """Compare a checkpoint's files with its manifest; a folder without one is not compared.

    Sizes are those of all files. Checksums are those of the files that every export reads; the optimizer's, which are
    several times as large, are left to :func:`check_optimizer`.

    Raises:
        ModelError: a file is missing or is not what was written.
    """
    file = path / MANIFEST
    if not file.is_file():
        if next(path.glob(_OPTIMIZER), None):
            raise ModelError(f"{file} is missing beside optimizer files, so the checkpoint is not whole; give another")
        return Manifest()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        sizes = {str(name): int(one["size"]) for name, one in content["files"].items()}
        checksums = {str(name): str(one["checksum"]) for name, one in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read ({first_line(error)}): the checkpoint is damaged") from error
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes long"
            raise ModelError(f"{path / name} is {state}, and {MANIFEST} has it with {size}: the checkpoint is damaged")
    manifest = Manifest(content, checksums)
    manifest.check(path, [name for name in checksums if not Path(name).match(_OPTIMIZER)])
    return manifest


def check_optimizer(path: Path, manifest: Manifest) -> None:
    """Compare the optimizer's files, which hold the fp32 master weights, with the manifest; errors as above."""
    manifest.check(path, [name for name in manifest.checksums if Path(name).match(_OPTIMIZER)])


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def weight_files(path: Path) -> WeightFiles:
    """The tensors of a full model, from the headers of its files alone.

    Raises:
        ModelError: a file is missing or torn, or the weights have a dtype that no export has.
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
    """The dtype of most weights of one file; errors as for :func:`weight_files`."""
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
        raise ModelError(f"{file} is torn ({first_line(error)}); copy or download it again") from error


def _most(elements: Counter[str], where: Path) -> torch.dtype:
    most = elements.most_common(1)[0][0] if elements else "missing"
    if most not in _DTYPES:
        raise ModelError(f"{where}: its weights are {most}; only {', '.join(_DTYPES)} can be exported")
    return _DTYPES[most]
