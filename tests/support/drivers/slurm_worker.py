"""A run's part toward SLURM, without training: it starts in a moment, and writes ``status.json`` as a run does.

The batch script calls it in the place of Python: ``-m alignment COMMAND RECIPE --output_dir FOLDER …``. The variable
``WORKER`` says what to do: ``wait`` for a signal; ``save``, which takes 3 seconds after it; or ``requeue``, which asks
for it once and finishes. The command ``prepare`` is real.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from alignment.run.status_file import RunStatus, StatusFile
from alignment.run.stop import StopReason

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def end(status: StatusFile, reason: StopReason) -> None:
    """Exit like a run after a stop request."""
    status.update(state=reason.state, signal=reason.name)
    sys.exit(reason.code)


def main() -> None:
    """One attempt."""
    command, folder = sys.argv[3], Path(sys.argv[sys.argv.index("--output_dir") + 1])
    if command == "prepare":
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    folder.mkdir(parents=True, exist_ok=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    seen = {"arguments": sys.argv[4:], "restarts": restarts, "time": time.time()}
    seen |= {"notice": os.environ.get("ALIGNMENT_STOP_NOTICE")}
    with (folder / "attempts.jsonl").open("a") as file:
        file.write(json.dumps(seen) + "\n")
    status = StatusFile(folder, RunStatus(job=os.environ["SLURM_JOB_ID"], restarts=restarts, stalled=1))
    status.update(state="running")
    todo = os.environ["WORKER"]
    if todo == "requeue" and not restarts:
        end(status, StopReason.SIGUSR1)
    if todo == "wait" or (todo == "save" and not restarts):
        told = signal.sigwait(SIGNALS)
        if todo == "save":
            time.sleep(3)
        end(status, StopReason[signal.Signals(told).name])
    status.update(state="finished")


if __name__ == "__main__":
    main()
