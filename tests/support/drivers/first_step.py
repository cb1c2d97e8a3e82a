"""Run the command until the end of its first optimizer step, then write the imported modules into a file and exit.

``python first_step.py FILE.json ARGUMENT ...``
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from alignment.cli.train import main
from alignment.config.registry import METHODS

find = METHODS.trainer


def watched(options: Any) -> Any:
    """The trainer class, with one more callback."""
    trainer = find(options)
    from transformers import TrainerCallback

    class AtFirstStep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            Path(sys.argv[1]).write_text(json.dumps(sorted(sys.modules)))
            os._exit(0)

    return functools.partial(trainer, callbacks=[AtFirstStep])


if __name__ == "__main__":
    with mock.patch.object(METHODS, "trainer", watched):
        main(sys.argv[2:])
