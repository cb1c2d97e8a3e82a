"""Members of transformers' ``TrainingArguments`` that are not options: rank, device, and log level."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TypeAlias

from alignment.config.dtypes import planned, uses_cuda
from alignment.config.errors import OptionError

if TYPE_CHECKING:
    import torch

# transformers' names of log levels; "passive" does not change the library's own level.
LogLevel: TypeAlias = Literal["passive", "detail", "debug", "info", "warning", "error", "critical"]


def _environment_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise OptionError(f"environment variable {name}={text!r}: expected an integer; unset it") from None


class ProcessFacts:
    """Properties of the options that depend on the process. torch is imported only when needed."""

    process_index = property(lambda self: _environment_int("RANK", 0), doc="Rank of this process.")
    local_process_index = property(lambda self: _environment_int("LOCAL_RANK", 0), doc="Local rank on this host.")
    n_gpu = property(lambda self: int(uses_cuda(self)), doc="Number of GPUs of this process: 1 or 0.")
    should_log = property(lambda self: self.process_index == 0, doc="Whether this process logs.")
    should_save = property(lambda self: self.process_index == 0, doc="Whether this process saves gathered values.")

    @property
    def world_size(self) -> int:
        """Number of processes."""
        machine = planned()
        return _environment_int("WORLD_SIZE", 1) if machine is None else machine.ranks

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        import torch

        return torch.device("cuda", self.local_process_index) if self.n_gpu else torch.device("cpu")

    def get_process_log_level(self) -> int:
        """Return the level for the loggers of a script: ``log_level`` on rank 0, ``log_level_replica`` on others."""
        from transformers.utils import logging

        name = vars(self)["log_level" if self.should_log else "log_level_replica"]
        return int(logging.get_verbosity() if name == "passive" else logging.log_levels[name])

    def main_process_first(self, local: bool = True, desc: str = "work") -> contextlib.AbstractContextManager[None]:
        """Run the body on the first rank (of every host if ``local``) before the others; ``desc`` has no effect."""
        return ahead_of_others((self.local_process_index if local else self.process_index) == 0)


@contextlib.contextmanager
def ahead_of_others(goes_first: bool) -> Iterator[None]:
    """Run the body on the ranks that go first, then on the others. Collective if there is a process group."""
    from torch import distributed

    together = distributed.is_available() and distributed.is_initialized()
    if together and not goes_first:
        distributed.barrier()
    try:
        yield
    finally:
        if together and goes_first:
            distributed.barrier()
