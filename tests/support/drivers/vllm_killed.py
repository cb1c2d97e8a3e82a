"""A run with completions from a server, which is killed when it calls a function for the third time.

Usage: vllm_killed.py SPEC.json, which has ``{"url", "model", "folder", "moment", "more"}``; ``moment`` is the dotted
name of a method.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from support.vllm_runs import make

CALLS = 3


def die_in(moment: str) -> None:
    """Replace a method by one that kills this process when it is called for the third time."""
    module, owner, name = moment.rsplit(".", 2)
    holder = getattr(importlib.import_module(module), owner)
    original, calls = getattr(holder, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == CALLS:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(holder, name, counted)


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    die_in(spec["moment"])
    make(spec["url"], spec["model"], Path(spec["folder"]), **spec["more"]).train()
