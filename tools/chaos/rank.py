"""A rank of the run under test: ``rank.py arguments of launch/train.py…``, with the planned kill in the environment.

:data:`VARIABLE` contains ``{"folder", "output_dir", "rank", "event", "occurrence", "node_lost"}`` as JSON: the folder
for process IDs and counts of events, and the event at which ``rank`` kills itself, or all ranks; "" for any event.
"""

from __future__ import annotations

import contextlib
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
    """Counts events, and kills this process with SIGKILL at one of them.

    Args:
        plan: the plan.
        dies: whether this process does.
    """

    def __init__(self, plan: dict[str, Any], dies: bool) -> None:
        self.plan, self.dies = plan, dies
        self.count, self.left = 0, plan["occurrence"]

    def __call__(self, event: str, half: Callable[[], Any] | None) -> None:
        """Handle an event."""
        self.count += 1
        if not self.dies or self.plan["event"] not in ("", event):
            return
        self.left -= 1
        if self.left == 0:
            if half is not None:
                half()
            others = Path(self.plan["folder"]).glob("pid-*") if self.plan["node_lost"] else ()
            for pid in (*(int(path.read_text()) for path in others), os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(60)  # wait for the signal


def main(plan: dict[str, Any]) -> None:
    """Observe events and run the command."""
    from alignment.cli.train import main as train
    from tools.chaos.events import Events

    own, folder = os.environ["RANK"], Path(plan["folder"])
    (folder / f"pid-{own}").write_text(str(os.getpid()))
    death = Death(plan, int(own) == plan["rank"])
    events = Events(Path(plan["output_dir"]), death)
    events.follow_run()
    events.follow_files()
    with mock.patch("alignment.training.run_page.draw_page"):  # takes 0.5 s
        try:
            train(program="launch/train.py")
        finally:
            (folder / f"events-{own}").write_text(str(death.count))


if __name__ == "__main__":
    main(json.loads(os.environ[VARIABLE]))
