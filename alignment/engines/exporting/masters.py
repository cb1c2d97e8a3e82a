"""The fp32 master weights of a checkpoint in the place of the 16-bit ones of its model files.

Training in 16 bits steps on an fp32 copy of the weights; a model file holds that copy rounded. An export in fp32 takes
the copy itself.
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
        model: whose trained parameters are in fp32, with the values of the model files. An adapter in it is called
            ``default``.
        masters: whole fp32 tensors by the names of training, where an adapter may have another name.
        stored: the dtype of the model files.
        folder: the checkpoint, for messages.
        see: is called with each parameter's name and master weight.

    Returns:
        how many were replaced.

    Raises:
        ModelError: one has no place, has another shape, or is not what the model files were rounded from.
    """
    parameters, count = dict(model.named_parameters()), 0
    for name, master in masters:
        found = next((one for one in _candidates(name) if one in parameters), None)
        if found is None:
            raise ModelError(f"{folder}: its fp32 master weights have {name}, and its model has no such parameter")
        parameter = parameters[found]
        if parameter.shape != master.shape or not _rounds_to(master, parameter, stored):
            raise ModelError(
                f"{folder}: the fp32 master weight of {name} is not that of its model files, which are of another "
                "step or damaged; export with --dtype auto to take the model files"
            )
        see(found, master)
        parameter.data.copy_(master)
        count += 1
    return count


def _candidates(name: str) -> Iterator[str]:
    """A parameter's name in training, and what it may be called here."""
    yield name
    parts = name.split(".")
    if "modules_to_save" in parts:  # such a module stands in the base itself here
        place = parts.index("modules_to_save")
        yield ".".join(parts[:place] + parts[place + 2 :])
    for place in range(len(parts)):  # an adapter of another name
        yield ".".join([*parts[:place], "default", *parts[place + 1 :]])


def _rounds_to(master: Tensor, value: Tensor, stored: torch.dtype) -> bool:
    """Whether ``value`` is ``master`` rounded to ``stored``, however ties and underflow are rounded."""
    info = torch.finfo(stored)
    return torch.allclose(value.float(), master.float(), rtol=info.eps, atol=info.smallest_normal * info.eps)
