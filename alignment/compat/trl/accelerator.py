"""``trainer.accelerator``: the members of accelerate's ``Accelerator`` that scripts and callbacks use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from alignment.engines.collectives import barrier, device
from alignment.run.ranks import local_rank, rank, world_size


class Accelerator:
    """Ranks and device of the run, as they are when it is created. It has no ``prepare``."""

    distributed_type = "DEEPSPEED"

    def __init__(self) -> None:
        self.process_index, self.local_process_index, self.num_processes = rank(), local_rank(), world_size()
        self.is_main_process, self.is_local_main_process = rank() == 0, local_rank() == 0
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
