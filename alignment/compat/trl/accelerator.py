"""``trainer.accelerator``: the members of accelerate's ``Accelerator`` that scripts and callbacks use."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from alignment.config.process_facts import ahead_of_others
from alignment.engines.collectives import barrier, device, gathered
from alignment.run.ranks import local_rank, rank, world_size


class Accelerator:
    """Ranks, device and collectives of the run, as they are when it is created. It has no ``prepare``."""

    distributed_type = "DEEPSPEED"
    fsdp_plugin = None

    def __init__(self) -> None:
        self.process_index, self.local_process_index, self.num_processes = rank(), local_rank(), world_size()
        self.is_main_process, self.is_local_main_process = rank() == 0, local_rank() == 0
        self.is_last_process = rank() == world_size() - 1
        self.device: torch.device = device()
        self.state = self  # of which scripts read the same fields

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
