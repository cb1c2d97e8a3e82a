"""A script that calls ``train()`` on two ranks, without a command: ``plain_script.py FAULT FOLDER MODEL``.

In step 3, rank 1 is stopped or killed, hangs, holds the interpreter lock, raises an error, exits, or goes ahead.
It first creates the file ``reached``. With ``data``, rank 0 cannot read the rows; with ``model``, rank 1 has no model.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.helpers import options, paired_rows
from transformers import TrainerCallback

from alignment import CPOConfig, CPOTrainer, RunStopped
from alignment.data.mixture import Part
from alignment.run.protection import protected

FAULTS = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(600),
    "lock": lambda: re.match("(a+)+b", "a" * 60),
    "error": lambda: 1 // 0,
    "exit": lambda: sys.exit(0),
    "term": lambda: None,
}


class Fault(TrainerCallback):
    """The fault of rank 1."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait until a heartbeat has told of the second step, and fail."""
        if state.global_step == 2 and os.environ["RANK"] == "1" and sys.argv[1] in FAULTS:
            time.sleep(1.2)
            (Path(sys.argv[2]) / "reached").touch()
            FAULTS[sys.argv[1]]()


def fail_on_creation() -> None:
    """Catch an error of the rows, which only rank 0 reads, or of one rank's model."""

    def rows() -> list[dict[str, Any]]:
        raise KeyError("label")

    model = f"{sys.argv[3]}-missing" if sys.argv[1] == "model" and os.environ["RANK"] == "1" else sys.argv[3]
    try:
        CPOTrainer(model, args=CPOConfig(**options(Path(sys.argv[2]))), train_dataset=Part("train_dataset", rows))
    except (KeyError, ValueError) as error:
        print(f"caught {type(error).__name__}")


def main() -> None:
    """Train, and evaluate without a fault."""
    tempfile.tempdir = sys.argv[2]
    if sys.argv[1] in ("data", "model"):
        fail_on_creation()
        return
    given = options(Path(sys.argv[2]), max_steps=4, peer_timeout=5, hang_timeout=8, hang_timeout_first=8)
    trainer = CPOTrainer(
        sys.argv[3], args=CPOConfig(**given), train_dataset=paired_rows(8, 3), eval_dataset=paired_rows(4, 3)
    )
    trainer.add_callback(Fault())
    try:
        trainer.train()
        trainer.evaluate()
        if sys.argv[1] == "term":  # a signal to one rank, in an evaluation
            with protected(trainer.output_dir, trainer.args):
                os.kill(os.getpid(), signal.SIGTERM if os.environ["RANK"] == "1" else 0)
                time.sleep(20)
    except RunStopped:
        print("stopped")
        raise
    except ZeroDivisionError:  # a rank that leaves the others alone, but does not exit
        time.sleep(10)
        os._exit(0)
    trainer.close()


if __name__ == "__main__":
    main()
