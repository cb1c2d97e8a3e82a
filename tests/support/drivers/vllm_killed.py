"""A run with completions from a server, which is killed when it calls a method for the Nth time.

Usage: vllm_killed.py SPEC.json, which has ``{"url", "model", "folder", "method", "call", "more"}``; ``method`` is a
dotted name.
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


def die_in(method: str, call: int) -> None:
    """Replace a method by one that kills this process when it is called for the Nth time."""
    module, owner, name = method.rsplit(".", 2)
    holder = getattr(importlib.import_module(module), owner)
    original, calls = getattr(holder, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(holder, name, counted)


if __name__ == "__main__":
    spec = json.loads(Path(sys.argv[1]).read_text())
    die_in(spec["method"], spec["call"])
    make(spec["url"], spec["model"], Path(spec["folder"]), **spec["more"]).train()
