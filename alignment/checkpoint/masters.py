"""Export of the fp32 master weights that training in 16 bits updates, instead of the rounded ones in model files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from alignment.checkpoint.fragments import master_weights
from alignment.checkpoint.manifest import MANIFEST, Manifest
from alignment.config.errors import CheckpointError, ModelError

_OPTIMIZER = "optimizer-*.safetensors"
Masters = Iterator[tuple[str, Tensor]]


def checked_masters(folder: Path, wanted: bool) -> Masters:
    """Compare a checkpoint's files with its manifest, and return its fp32 master weights, by name and one at a time.

    A folder that is no checkpoint has none. Unless they are ``wanted``, the optimizer's files are not read.

    Raises:
        CheckpointError: a file is missing or has changed since it was written, or the manifest is damaged.
    """
    if not (folder / MANIFEST).is_file():
        if any(folder.glob(_OPTIMIZER)) or folder.name.endswith(".partial"):
            raise CheckpointError(f"{folder / MANIFEST} is missing: the checkpoint is not complete; pass another one")
        return iter(())
    manifest = Manifest.read(folder)
    manifest.check_files(folder)
    optimizer = {name for name in manifest.files if Path(name).match(_OPTIMIZER)}
    manifest.check_contents(folder, [name for name in manifest.files if wanted or name not in optimizer])
    if not (wanted and optimizer):
        return iter(())
    return ((name, master) for name, master in master_weights(folder) if master.dtype == torch.float32)


@torch.no_grad()
def put_masters(model: nn.Module, masters: Masters, folder: Path) -> int:
    """Replace fp32 parameters, which have the values of the model files, by their master weights; return their number.

    Raises ModelError if a master weight has no parameter or does not round to the value in the model files.
    """
    parameters, count = dict(model.named_parameters()), 0
    relative, absolute = torch.finfo(torch.bfloat16).eps, 2.0**-24  # rounding to bf16, underflow in fp16
    for name, master in masters:
        parameter = next((parameters[one] for one in _names_here(name) if one in parameters), torch.empty(0))
        if parameter.shape != master.shape or not torch.allclose(parameter, master, relative, absolute):
            raise ModelError(
                f"{folder}: the fp32 master weight of {name} does not match the model files, which are damaged or "
                "from another step; export with --dtype auto to use the model files"
            )
        parameter.copy_(master)
        count += 1
    return count


def _names_here(name: str) -> Iterator[str]:
    """A parameter's name in training, followed by its possible names in a model to export."""
    yield name
    parts = name.split(".")
    for place in range(len(parts)):  # an adapter of another name is called `default` here
        yield ".".join([*parts[:place], "default", *parts[place + 1 :]])
