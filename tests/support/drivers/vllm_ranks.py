"""Two ranks whose completions come from the servers of a test, one run after another.

Usage: vllm_ranks.py SPEC.json, which has ``{name: {"url", "model", "more", "stop"}}``; each rank writes what it
logged, and its error, to ``rank{N}.json`` next to it. ``stop``: seconds after which every rank gets SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

from support.vllm_runs import make

from alignment.cli.guarded import guarded
from alignment.config.errors import TrainingError
from alignment.run.ranks import rank
from alignment.run.stop import REQUESTS, RunStopped


def outcome(folder: Path, url: str, model: str, more: dict[str, Any], stop: float | None) -> dict[str, Any]:
    """Train, and return what happened."""
    trainer, error = make(url, model, folder, **more), ""
    timer = threading.Timer(stop or 0.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    if stop is not None:
        timer.start()
    try:
        trainer.train()
    except (TrainingError, RunStopped) as failure:
        error = f"{type(failure).__name__}: {failure}"
    trainer.close()
    REQUESTS.forget()
    return {"log": trainer.state.log_history, "error": error, "step": trainer.state.global_step}


def main() -> None:
    """Make all runs of the file."""
    mock.patch("alignment.training.run_page.draw_page").start()
    spec = Path(sys.argv[1])
    runs = json.loads(spec.read_text()).items()
    found = {name: outcome(spec.parent / name, **run) for name, run in runs}
    (spec.parent / f"rank{rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(guarded(main, use_cpu=True))
