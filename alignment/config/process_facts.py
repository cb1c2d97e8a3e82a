"""Members of transformers' ``TrainingArguments`` that are not options: rank, device, saving ranks, and log level."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from alignment.config.dtypes import planned, uses_cuda
from alignment.config.errors import OptionError
from alignment.internals.transformers import parallel_mode

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


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"environment variable {name}={text!r}: expected an integer; unset it") from None


class ProcessFacts:
    """Properties of the options that depend on the process. torch is imported only when needed."""

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return _environment_int("RANK", 0)

    @property
    def local_process_index(self) -> int:
        """Local rank of this process on its host."""
        return _environment_int("LOCAL_RANK", 0)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        machine = planned()
        return _environment_int("WORLD_SIZE", 1) if machine is None else machine.ranks

    @property
    def n_gpu(self) -> int:
        """Number of GPUs of this process: 1 or 0."""
        return int(uses_cuda(self))

    @property
    def parallel_mode(self) -> Any:
        """transformers' ``ParallelMode``, for callbacks; transformers must be imported already."""
        if self.world_size > 1:
            return parallel_mode("DISTRIBUTED")
        return parallel_mode("NOT_DISTRIBUTED" if self.n_gpu else "NOT_PARALLEL")

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
