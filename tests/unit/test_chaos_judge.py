"""The judge of killed runs detects damage and different results."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from alignment.checkpoint.manifest import Manifest, files_in, record_of
from tools.chaos.judge import Look, compare, look, lost


def finished(output_dir: Path, resumed: int = 0) -> Path:
    """A finished run that logged every step and was resumed after one of them."""
    for step, folder in ((2, output_dir / "checkpoint-2"), (4, output_dir / "checkpoint-4"), (0, output_dir)):
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text('{"best_model_checkpoint": null, "log_history": []}')
        if step:
            files = {name: record_of(folder / name) for name in files_in(folder)}
            Manifest("r", step, "kto", 1, 0, 8, 4, True, {}, {}, {}, files).write(folder)
    records = [{"loss": 1 / step, "step": step} for step in range(1, 5)]
    records[resumed:resumed] = [{"event": "resume", "step": resumed, "attempt": 2}] if resumed else []
    (output_dir / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + '{"st')
    return output_dir


def test_damage_and_a_difference_in_the_result_are_detected(tmp_path: Path) -> None:
    reference, run = finished(tmp_path / "reference"), finished(tmp_path / "run", resumed=2)
    assert look(run) == Look((2, 4))
    assert compare(run, reference, [2]) == []
    assert any("expected [3]" in problem for problem in compare(run, reference, [3]))
    for name in ("model.safetensors", "checkpoint-4/model.safetensors"):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert any("the content differs" in problem for problem in compare(run, reference, [2]))
    (problem,) = look(run).problems
    assert "does not match the manifest" in problem
    assert len(lost(Look((2, 4)), Look((4,)), 2)) == 1 and not lost(Look((2, 4)), Look((4, 6)), 2)
