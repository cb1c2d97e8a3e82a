"""The judge of killed runs detects damage and different results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file

from tools.chaos.judge import Look, compare, look, lost


def checkpoint(output_dir: Path, step: int, best: int) -> Path:
    """A complete checkpoint with two files."""
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"weight": torch.full((4,), float(step))}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": f"/old/place/checkpoint-{best}"}))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    records = {
        name: {"size": len(one), "checksum": xxhash.xxh3_128_hexdigest(one)} for name, one in sorted(files.items())
    }
    (folder / "manifest.json").write_text(json.dumps({"step": step, "files": records}))
    return folder


def finished(output_dir: Path, *, resumed: tuple[int, ...] = (), steps: int = 4) -> Path:
    """A finished run that logged every step and was resumed after some of them."""
    checkpoint(output_dir, steps, steps)
    save_file({"weight": torch.ones(4)}, output_dir / "model.safetensors")
    records: list[dict[str, Any]] = [{"event": "start", "run": str(output_dir), "method": "kto"}]
    for step in range(1, steps + 1):
        records.append({"loss": 1 / step, "step": step, "eval_runtime": hash(output_dir)})
        if step in resumed:
            records.append({"event": "resume", "step": step, "attempt": resumed.index(step) + 2})
    (output_dir / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (output_dir / "completions.jsonl").write_text('{"step": 1}\n')
    state = {"best_model_checkpoint": str(output_dir / "checkpoint-4"), "log_history": [{"loss": 1.0}], "epoch": 1.0}
    (output_dir / "trainer_state.json").write_text(json.dumps(state))
    return output_dir


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_damage_is_detected(tmp_path: Path) -> None:
    for step in (2, 4):
        checkpoint(tmp_path, step, 2)
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n{"st')  # a kill truncates the last line
    assert look(tmp_path) == Look((2, 4))
    flip(tmp_path / "checkpoint-4" / "model.safetensors")
    (problem,) = look(tmp_path).problems
    assert "does not match the manifest" in problem
    assert len(lost(Look((2, 4)), Look((4,)), 2)) == 1 and not lost(Look((2, 4)), Look((4, 6)), 2)


def test_a_difference_in_the_result_is_detected(tmp_path: Path) -> None:
    reference, run = finished(tmp_path / "reference"), finished(tmp_path / "run", resumed=(2,))
    assert compare(run, reference, [2]) == []
    assert any("expected [3]" in problem for problem in compare(run, reference, [3]))
    flip(run / "model.safetensors")
    assert any("the content differs" in problem for problem in compare(run, reference, [2]))
