"""State that training changes without optimizing it: buffers, and frozen parameters that a module modifies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alignment.checkpoint.tensors import TensorFile
from alignment.internals.deepspeed_zero3 import is_partitioned
from alignment.internals.torch import version_of


class FrozenTensors:
    """The buffers and frozen parameters of a model in its engine, monitored for changes from construction on.

    Partitioned parameters are excluded: ZeRO-3 discards what a module writes into a gathered one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._before = {name: (tensor, version_of(tensor)) for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        frozen = {n: p for n, p in self.model.named_parameters() if not p.requires_grad and not is_partitioned(p)}
        return frozen | dict(self.model.named_buffers())

    @property
    def changed(self) -> dict[str, Tensor]:
        """The tensors that were modified or replaced, by name."""
        found = {}
        for name, tensor in self._tensors().items():
            before, version = self._before.get(name, (None, 0))
            if before is not tensor or version_of(tensor) != version:
                found[name] = tensor.detach()
        return found

    @torch.no_grad()
    def restore(self, file: TensorFile) -> None:
        """Restore what :func:`write_frozen` wrote: into the existing tensor, or as a new one if it does not match."""
        present = self._tensors()
        for key in sorted(file.keys):
            value = file.tensor(key).clone()
            owner, _, name = key.rpartition(".")
            tensor, module = present.get(key), self.model.get_submodule(owner)
            if tensor is None:
                module.register_buffer(name, value, persistent=False)
            elif (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
                tensor.copy_(value)
            else:  # assigned as the module does, so that its persistence does not change
                setattr(module, name, value.to(tensor.device))


def frozen_file(rank: int, ranks: int) -> str:
    """The file name of a rank; the file exists only if something has changed."""
    return f"frozen-{rank + 1:05d}-of-{ranks:05d}.safetensors"
