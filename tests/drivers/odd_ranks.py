"""Ranks that tell their view of themselves, or leave a daemon each, of which rank 1 fails: ``odd_ranks.py WHAT``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    if sys.argv[1] == "facts":
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OWN")
        facts = {
            "variables": {name: os.environ.get(name) for name in names},
            "arguments": sys.argv[1:],
            "folder": os.getcwd(),
            "imported": {name: name in sys.modules for name in ("torch", "deepspeed", "alignment", "helpers")},
        }
        print(json.dumps(facts))
        sys.exit()
    # Must be found to be ended: it has left the session and the group of its rank.
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (Path(os.environ["PIDS"]) / str(left.pid)).touch()
    if os.environ["RANK"] == "1":
        time.sleep(1)
        raise ValueError("a defect")
    time.sleep(600)
