"""``tools/same_numbers.py``: what counts as a difference; ``test_same_numbers_runs.py`` makes its runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tools.comparing.comparison import compare

START, STEP = {"event": "start", "steps": 2}, {"loss": 0.5, "kl": float("nan"), "step": 1}
END = {"event": "end", "phases": {"learn": {"tokens": 30, "seconds": 0.1, "peak_bytes": 7}}}


def write(folder: Path, *records: dict[str, Any], weight: float = 1.0) -> Path:
    """Write an output folder with a log and a model."""
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    save_file({"w": torch.tensor([weight, 2.0])}, folder / "model.safetensors")
    return folder


def test_time_and_memory_may_differ_and_nothing_else(tmp_path: Path) -> None:
    base, head = write(tmp_path / "base", START, STEP, END), tmp_path / "head"
    phases = {"learn": {"tokens": 30, "seconds": 99.0, "peak_bytes": 1}}
    write(head, {**START, "run": "0f8060"}, STEP, {**END, "phases": phases})
    assert compare(base, head) == []
    write(head, START, {**STEP, "loss": 0.5000000000000001}, END, weight=1.0000001)
    loss, weight = compare(base, head)
    assert loss == "log.jsonl line 2 (step 1): loss: 0.5 | 0.5000000000000001"
    assert weight.startswith("model.safetensors: w: [2] torch.float32 ")
