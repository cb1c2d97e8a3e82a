"""Members of transformers' ``TrainingArguments`` that are not options: rank, device, saving ranks, and log level."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

LogLevel: TypeAlias = Literal["passive", "detail", "debug", "info", "warning", "error", "critical"]
# transformers' names of log levels, except "passive", which does not change the library's own level.
LEVELS = {
    "detail": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


class ProcessFacts:
    """Properties of the options that depend on the process. torch is imported only when needed."""

    if TYPE_CHECKING:
        warmup_steps: float
        warmup_ratio: float
        log_level: LogLevel
        log_level_replica: LogLevel

        @property
        def n_gpu(self) -> int: ...

        @property
        def process_index(self) -> int: ...

        @property
        def local_process_index(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        import torch

        return torch.device("cuda", self.local_process_index) if self.n_gpu else torch.device("cpu")

    @property
    def should_log(self) -> bool:
        """Whether this process logs: true on rank 0."""
        return self.process_index == 0

    @property
    def should_save(self) -> bool:
        """Whether this process saves what is gathered from all ranks: true on rank 0."""
        return self.process_index == 0

    @property
    def place_model_on_device(self) -> bool:
        """Whether the engine moves the model to its device: always true."""
        return True

    def get_process_log_level(self) -> int:
        """Return the level for the loggers of a script, as in the module ``logging``.

        This is ``log_level`` on rank 0 and ``log_level_replica`` on other ranks, or the level of transformers if that
        is ``passive``.
        """
        name = self.log_level if self.should_log else self.log_level_replica
        if name in LEVELS:
            return LEVELS[name]
        from transformers.utils import logging as transformers_logging

        return int(transformers_logging.get_verbosity())

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Return the number of warmup steps; a fraction of the training steps is rounded up, as in transformers."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(num_training_steps * (self.warmup_steps or self.warmup_ratio))

    def main_process_first(self, local: bool = True, desc: str = "work") -> contextlib.AbstractContextManager[None]:
        """Run the body on the main process before the others, for example to fill a cache that they read. Collective.

        Args:
            local: whether rank 0 of every host goes first (the default), or only rank 0 of the run.
            desc: has no effect; describes the work.
        """
        return ahead_of_others((self.local_process_index if local else self.process_index) == 0)


@contextlib.contextmanager
def ahead_of_others(goes_first: bool) -> Iterator[None]:
    """Run the body on the ranks that go first, then on the others. Collective."""
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
