"""A rank of the run under test: ``rank.py arguments of launch/train.py…``, with the planned kill in the environment.

:data:`VARIABLE` contains ``{"folder", "output_dir", "ranks", "event", "occurrence"}`` as JSON: the folder for the
process ID and the trail, and the event at which this process kills itself if it is one of the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

VARIABLE = "ALIGNMENT_CHAOS"


class Death:
    """Kills this process with SIGKILL at a given occurrence of an event.

    Args:
        event: name of the event.
        occurrence: which occurrence, counted from 1.
    """

    def __init__(self, event: str, occurrence: int) -> None:
        self.event, self.left = event, occurrence

    def __call__(self, event: str, half: Callable[[], Any] | None) -> None:
        """Handle an event."""
        if event != self.event:
            return
        self.left -= 1
        if self.left == 0:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # wait for the signal


def _survive(event: str, half: Callable[[], Any] | None) -> None:
    """Do nothing instead of killing the process."""


def main(plan: dict[str, Any]) -> None:
    """Observe events and run the command."""
    from tools.chaos.events import Events, Trail

    own, folder = int(os.environ["RANK"]), Path(plan["folder"])
    trail = Trail(folder / f"trail-{own}")
    pid = folder / f".pid-{own}"
    pid.write_text(str(os.getpid()))
    pid.rename(folder / f"pid-{own}")
    dies = own in plan["ranks"] and plan["event"] is not None
    events = Events(Path(plan["output_dir"]), Death(plan["event"], plan["occurrence"]) if dies else _survive, trail)
    events.follow_run()
    events.follow_files()

    from alignment.cli.train import main as train

    with mock.patch("alignment.training.run_page.draw_page"):  # takes 0.5 s
        train(program="launch/train.py")


if __name__ == "__main__":
    main(json.loads(os.environ[VARIABLE]))
