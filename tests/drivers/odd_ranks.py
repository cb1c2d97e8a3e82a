"""Ranks that follow their arguments: ``odd_ranks.py WHAT``; they leave their PIDs in the folder PIDS."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def facts() -> dict[str, object]:
    """A rank's view of itself."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OWN")
    return {
        "variables": {name: os.environ.get(name) for name in names},
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "imported": {name: name in sys.modules for name in ("torch", "deepspeed", "datasets", "alignment", "helpers")},
    }


def note(pid: int) -> None:
    """Record the PID of a process."""
    if "PIDS" in os.environ:
        (Path(os.environ["PIDS"]) / str(pid)).touch()


def main() -> None:
    """Rank 1 misbehaves; rank 0 continues."""
    what, rank = sys.argv[1], int(os.environ["RANK"])
    print(f"rank {rank} began", flush=True)
    note(os.getpid())
    if what == "facts":
        print(json.dumps(facts()))
    elif what == "daemon":
        # Must be found to be ended: it has left the session and the group of its rank.
        note(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    elif what == "both hang":
        time.sleep(600)
    elif rank == 1:
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "fails":
            raise ValueError("a defect")
        waits_for_ever()
    elif what in ("killed", "fails"):
        time.sleep(600)


def waits_for_ever() -> None:
    """Appears in the stack of a hanging rank."""
    time.sleep(600)


if __name__ == "__main__":
    main()
