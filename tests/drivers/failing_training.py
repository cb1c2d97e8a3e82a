"""The training command with a failure on rank 1 only: `failing_training.py WHAT arguments of the command…`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

import alignment.cli.train
import alignment.data.kinds.unpaired
import alignment.methods.kto
import alignment.training.trainer
from alignment.config.errors import DataError


def collate(*args: Any) -> Any:
    """Replace the collation of a batch."""
    raise DataError("rows.jsonl, row 3: the completion cannot be read; correct the row")


def loss(*args: Any, **kwargs: Any) -> Any:
    """Replace the loss."""
    raise RuntimeError("the loss exploded")


def killed(*args: Any, **kwargs: Any) -> None:
    """Replace the creation of the first layer, while the other rank loads the model with this one."""
    os.kill(os.getpid(), signal.SIGKILL)


PLACES = {
    "data": (alignment.data.kinds.unpaired.Unpaired, "collate", collate),
    "loss": (alignment.methods.kto, "kto_loss", loss),
    "killed": (torch.nn.Embedding, "__init__", killed),
}

if __name__ == "__main__":
    # The deepspeed launcher puts --local_rank=N before everything else.
    what = next(argument for argument in sys.argv[1:] if argument in PLACES)
    arguments = [argument for argument in sys.argv[1:] if argument != what]
    if os.environ["RANK"] == "1":
        setattr(*PLACES[what])
    alignment.cli.train.main(arguments)
