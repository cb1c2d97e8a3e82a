"""A script whose data loader worker fails: ``failing_loader.py MODEL FOLDER error|killed``.

The other worker is ended by ``internals.torch.stop_workers``.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

from support.helpers import options, paired_rows

from alignment import CPOConfig, CPOTrainer
from alignment.data.batching import EpochWindows

original = EpochWindows.__getitem__


def failing(self: Any, step: int) -> Any:
    """Fail as a disk does, or as a worker that is killed for memory."""
    if step == 1:
        if sys.argv[3] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, "Input/output error")
    return original(self, step)


if __name__ == "__main__":
    EpochWindows.__getitem__ = failing  # type: ignore[method-assign]
    args = CPOConfig(**options(Path(sys.argv[2]), dataloader_num_workers=2, use_cpu=True))
    CPOTrainer(sys.argv[1], args=args, train_dataset=paired_rows(16)).train()
