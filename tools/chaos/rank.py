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


def main(plan: dict[str, Any]) -> None:
    """Observe events, run the command, and kill this process with SIGKILL at the planned event."""
    from alignment.cli.train import main as train
    from tools.chaos.events import Events

    own, folder = os.environ["RANK"], Path(plan["folder"])
    (folder / f"pid-{own}").write_text(str(os.getpid()))
    count, left = 0, plan["occurrence"]

    def hear(event: str, half: Callable[[], Any] | None) -> None:
        nonlocal count, left
        count += 1
        if int(own) != plan["rank"] or plan["event"] not in ("", event):
            return
        left -= 1
        if left == 0:
            if half is not None:
                half()
            others = folder.glob("pid-*") if plan["node_lost"] else ()
            for pid in (*(int(path.read_text()) for path in others), os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(60)  # wait for the signal

    events = Events(Path(plan["output_dir"]), hear)
    events.follow_run()
    events.follow_files()
    with mock.patch("alignment.training.run_page.draw_page"):  # takes 0.5 s
        try:
            train(program="launch/train.py")
        finally:
            (folder / f"events-{own}").write_text(str(count))


if __name__ == "__main__":
    main(json.loads(os.environ[VARIABLE]))
