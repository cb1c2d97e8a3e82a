"""Run ``launch/train.py`` until the end of its first optimizer step, and write two JSON lists into a file.

``python first_step.py FILE.json ARGUMENT ...``. The lists are the package's frames at the first ``engine.backward``,
and the imported modules at the end of the step.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed

ROOT = Path(__file__).resolve().parents[3]
FILE = Path(sys.argv.pop(1))
ENGINE = deepspeed.DeepSpeedEngine
_backward, _step = ENGINE.backward, ENGINE.step
_frames: list[str] = []


def backward(engine: Any, *given: Any, **named: Any) -> Any:
    """Replace ``DeepSpeedEngine.backward``."""
    own = f"{ROOT}/alignment", f"{ROOT}/launch"
    if not _frames:
        frames = [each for each in traceback.extract_stack() if each.filename.startswith(own)]
        _frames.extend(f"{Path(each.filename).relative_to(ROOT)}:{each.name}" for each in frames)
    return _backward(engine, *given, **named)


def step(engine: Any, *given: Any, **named: Any) -> None:
    """Replace ``DeepSpeedEngine.step``."""
    _step(engine, *given, **named)
    if engine.global_steps:
        FILE.write_text(json.dumps([_frames, sorted(sys.modules)]))
        os._exit(0)


if __name__ == "__main__":
    ENGINE.backward, ENGINE.step = backward, step
    runpy.run_path(str(ROOT / "launch" / "train.py"), run_name="__main__")
