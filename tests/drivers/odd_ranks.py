"""Ranks that tell their view of themselves."""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OWN")
    facts = {
        "variables": {name: os.environ.get(name) for name in names},
        "arguments": sys.argv[1:],
        "folder": os.getcwd(),
        "imported": {name: name in sys.modules for name in ("torch", "deepspeed", "alignment", "helpers")},
    }
    print(json.dumps(facts))
