"""From the command to the gradient: few frames, so that a reader can follow a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.helpers import make_model, unpaired_rows

ROOT = Path(__file__).resolve().parents[2]
MOST = 11


@pytest.mark.ci
def test_few_frames_lie_between_the_command_and_the_gradient(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in unpaired_rows(8)))
    options = ["--method", "kto", "--model_name_or_path", model, "--dataset_name", str(data), "--max_steps", "1"]
    options += ["--output_dir", str(tmp_path / "out"), "--per_device_train_batch_size", "4", "--max_length", "96"]
    driver = ROOT / "tests" / "support" / "drivers" / "main_path.py"
    done = subprocess.run([sys.executable, driver, *options], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FRAMES ")]
    frames = json.loads(line.removeprefix("FRAMES "))
    assert frames[0].startswith("launch/train.py") and frames[-1].endswith("scoring.py:backward")
    assert len(frames) <= MOST, frames
