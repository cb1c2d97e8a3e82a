"""``trainer.accelerator``: the members of accelerate's ``Accelerator`` that scripts and callbacks use."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from alignment.config.process_facts import ahead_of_others
from alignment.engines.collectives import barrier, device, gathered
from alignment.run.ranks import local_rank, rank, world_size


class Accelerator:
    """Ranks, device and collectives of the run. It has no ``prepare``: the trainer builds its engines."""

    distributed_type = "DEEPSPEED"

    @property
    def process_index(self) -> int:
        """The index of this rank."""
        return rank()

    @property
    def local_process_index(self) -> int:
        """The index of this rank on its machine."""
        return local_rank()

    @property
    def num_processes(self) -> int:
        """The number of ranks."""
        return world_size()

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first rank."""
        return rank() == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return local_rank() == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return rank() == world_size() - 1

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return device()

    @property
    def state(self) -> SimpleNamespace:
        """The fields of accelerate's state that scripts read: the ranks, and no FSDP plugin."""
        return SimpleNamespace(
            fsdp_plugin=None,
            distributed_type=self.distributed_type,
            process_index=rank(),
            local_process_index=local_rank(),
            num_processes=world_size(),
            device=device(),
        )

    def print(self, *values: Any, **options: Any) -> None:
        """Like ``print``, on the first rank of each machine."""
        if self.is_local_main_process:
            print(*values, **options)

    def wait_for_everyone(self) -> None:
        """Wait until all ranks arrive here."""
        barrier()

    def unwrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Return the model itself, unwrapped from a DeepSpeed engine."""
        inner = getattr(model, "module", model)
        scored = getattr(inner, "model", None) if type(inner).__module__.startswith("alignment.") else None
        return scored if isinstance(scored, nn.Module) else inner

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the (ranks x B, …) concatenated tensors of all ranks, which must have equal shapes. Collective."""
        parts = [part if part.ndim else part[None] for part in gathered(tensor.detach().cpu())]
        return torch.cat(parts).to(tensor.device)

    def gather_for_metrics(self, tensor: Tensor, *_: Any) -> Tensor:
        """Same as :meth:`gather`."""
        return self.gather(tensor)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Let the first rank run the body before all others. Collective."""
        return ahead_of_others(self.is_main_process)

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Let the first rank of each machine run the body before its others. Collective."""
        return ahead_of_others(self.is_local_main_process)
