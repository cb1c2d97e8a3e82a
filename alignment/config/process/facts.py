"""Members of transformers' ``TrainingArguments`` that are no options: rank, device, who writes, and how loud to be."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# transformers' names of levels, besides "passive", which leaves the library's own level as it is.
LEVELS = {
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class ProcessFacts:
    """The part of the options that is a matter of the process. torch is imported where it is asked for."""

    if TYPE_CHECKING:
        warmup_steps: float
        warmup_ratio: float
        log_level: str
        log_level_replica: str

        @property
        def n_gpu(self) -> int: ...

        @property
        def process_index(self) -> int: ...

        @property
        def local_process_index(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        import torch

        return torch.device("cuda", self.local_process_index) if self.n_gpu else torch.device("cpu")

    @property
    def should_log(self) -> bool:
        """Whether this process prints: the first rank."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this process writes what all ranks gather: the first rank."""
        return self.process_index == 0

    @property
    def place_model_on_device(self) -> bool:
        """Whether the engine moves the model to its device: always."""
        return True

    def get_process_log_level(self) -> int:
        """The level for the loggers of a script, as in the module ``logging``.

        It is that of ``log_level``, of other ranks than the first that of ``log_level_replica``; where that is
        ``passive``, the level that transformers logs at.
        """
        name = self.log_level if self.should_log else self.log_level_replica
        if name in LEVELS:
            return LEVELS[name]
        from transformers.utils import logging as transformers_logging

        return int(transformers_logging.get_verbosity())

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Steps of the warm-up in a run of so many; a share of them is rounded up, as transformers does."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * (self.warmup_steps or self.warmup_ratio))

    def main_process_first(self, local: bool = True, desc: str = "work") -> contextlib.AbstractContextManager[None]:
        """One rank runs the body before the others do, such as to fill a cache that they read. Collective.

        Args:
            local: the first rank of each machine goes first; False: the first rank of all.
            desc: of no effect; names the work, for readers.
        """
        return ahead_of_others((self.local_process_index if local else self.process_index) == 0)


@contextlib.contextmanager
def ahead_of_others(goes_first: bool) -> Iterator[None]:
    """The body runs on ranks that go first, then on the others; at once where there is one process. Collective."""
    import torch
    from torch import distributed

    together = distributed.is_available() and distributed.is_initialized()
    device = [torch.cuda.current_device()] if together and distributed.get_backend() == "nccl" else None
    if together and not goes_first:
        distributed.barrier(device_ids=device)
    try:
        yield
    finally:
        if together and goes_first:
            distributed.barrier(device_ids=device)
