"""The fp32 master weights of a checkpoint instead of the 16-bit ones of its model files.

Training in 16 bits updates an fp32 copy of the weights; a model file contains that copy rounded. An export in fp32
uses the copy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from alignment.config.errors import ModelError


@torch.no_grad()
def put_masters(
    model: nn.Module,
    masters: Iterator[tuple[str, Tensor]],
    stored: torch.dtype,
    folder: Path,
    see: Callable[[str, Tensor], None] = lambda name, master: None,
) -> int:
    """Replace parameters by their master weights.

    Args:
        model: a model whose trained parameters are in fp32, with the values of the model files. An adapter in it is
            called ``default``.
        masters: unsharded fp32 tensors by their names in training, where an adapter may have another name.
        stored: dtype of the model files.
        folder: the checkpoint, for messages.
        see: called with each parameter's name and master weight.

    Returns:
        The number of replaced parameters.

    Raises:
        ModelError: a master weight has no parameter, has another shape, or does not round to the model files' value.
    """
    parameters, count = dict(model.named_parameters()), 0
    for name, master in masters:
        found = next((one for one in _candidates(name) if one in parameters), None)
        if found is None:
            raise ModelError(f"{folder}: the fp32 master weights contain {name}, but the model has no such parameter")
        parameter = parameters[found]
        if parameter.shape != master.shape or not _rounds_to(master, parameter, stored):
            raise ModelError(
                f"{folder}: the fp32 master weight of {name} does not match the model files, which are damaged or "
                "from another step; export with --dtype auto to use the model files"
            )
        see(found, master)
        parameter.data.copy_(master)
        count += 1
    return count


def _candidates(name: str) -> Iterator[str]:
    """A parameter's name in training, followed by its possible names here."""
    yield name
    parts = name.split(".")
    if "modules_to_save" in parts:  # here, such a module is in the base itself
        place = parts.index("modules_to_save")
        yield ".".join(parts[:place] + parts[place + 2 :])
    for place in range(len(parts)):  # an adapter of another name
        yield ".".join([*parts[:place], "default", *parts[place + 1 :]])


def _rounds_to(master: Tensor, value: Tensor, stored: torch.dtype) -> bool:
    """Whether ``value`` is ``master`` rounded to ``stored``, with any rounding of ties and underflow."""
    info = torch.finfo(stored)
    return torch.allclose(value.float(), master.float(), rtol=info.eps, atol=info.smallest_normal * info.eps)
