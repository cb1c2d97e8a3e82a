"""Resuming from Python: with a user's optimizer and schedule, in another folder, next to an earlier trainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.helpers import options, train_and_close, unpaired_rows
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from alignment import KTOConfig, KTOTrainer
from alignment.checkpoint.engine_state import ScheduleState
from alignment.checkpoint.folder import checkpoints
from alignment.config.errors import CheckpointError, OutputError

pytestmark = pytest.mark.usefixtures("own_process_group")
STEPS = 6
BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}


def make(model: str, folder: Path, callbacks: Sequence[Any] = (), **more: Any) -> KTOTrainer:
    given = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, **more}
    return KTOTrainer(
        model=model,
        args=KTOConfig(**options(folder, **given)),
        train_dataset=unpaired_rows(12, 3),
        eval_dataset=unpaired_rows(4, 4),
        callbacks=list(callbacks),
    )


def test_a_nested_schedule_continues() -> None:
    """The milestones, which are keys of a mapping, are two levels deep."""

    def made() -> torch.optim.lr_scheduler.SequentialLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        parts = [torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4]) for _ in range(2)]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])

    def rates(scheduler: torch.optim.lr_scheduler.SequentialLR, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            scheduler.optimizer.step()
            scheduler.step()
            found.append(scheduler.get_last_lr()[0])
        return found

    whole, first, second = made(), made(), made()
    expected = rates(whole, 9)
    assert rates(first, 1) == expected[:1] and len(set(expected)) > 2
    ScheduleState(second).load_state_dict(json.loads(json.dumps(ScheduleState(first).state_dict())))
    second.optimizer.param_groups[0]["lr"] = first.optimizer.param_groups[0]["lr"]
    assert rates(second, 8) == expected[1:]


class Keeping(TrainerCallback, ExportableState):
    """Has a state."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"kept": self.kept}}


def test_state_of_callbacks(model: str, tmp_path: Path) -> None:
    """NumPy scalars, and two callbacks of one class; a state that cannot be saved is refused before the first step."""
    trainer = train_and_close(make(model, tmp_path, [Keeping(np.float32(0.5)), Keeping(7)]))
    again = [Keeping(0), Keeping(0)]
    trainer = train_and_close(make(model, tmp_path, again), resume_from_checkpoint=True)
    assert [callback.kept for callback in again] == [0.5, 7]
    trainer = make(model, tmp_path / "other", [Keeping({1, 2})])
    with pytest.raises(CheckpointError, match="cannot be saved: .*set"):
        trainer.train()
    assert trainer.state.global_step == 0 and not checkpoints(tmp_path / "other" / "out")


def test_resuming_in_another_folder(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best model is found in the old folder; if it is gone, the best of later evaluations is used."""
    first = train_and_close(make(model, tmp_path / "a", **BEST), save=True)
    assert first.state.best_global_step == 2
    weights = (first.output_dir / "model.safetensors").read_bytes()
    for name, found in (("b", True), ("c", False)):
        if not found:
            shutil.rmtree(first.output_dir / "checkpoint-2")
        second = make(model, tmp_path / name, **BEST)
        train_and_close(second, save=True, resume_from_checkpoint=str(first.output_dir / "checkpoint-4"))
        assert [path.name for path in checkpoints(second.output_dir)] == ["checkpoint-6"]
        assert ((second.output_dir / "model.safetensors").read_bytes() == weights) is found
        assert ("the best checkpoint so far cannot be used" in capsys.readouterr().out) is not found
        assert second.state.best_global_step == (2 if found else 6)


class Damaging(TrainerCallback):
    """Changes a byte of a file after the last save."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == STEPS:
            content = bytearray(self.file.read_bytes())
            content[-1] ^= 1
            self.file.write_bytes(content)


def test_a_damaged_best_model_is_not_loaded(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(model, tmp_path, **BEST)
    trainer.add_callback(Damaging(trainer.output_dir / "checkpoint-2" / "model.safetensors"))
    train_and_close(trainer, save=True)
    assert "model.safetensors: the content has changed since it was written" in capsys.readouterr().out
    last = trainer.output_dir / f"checkpoint-{STEPS}" / "model.safetensors"
    assert (trainer.output_dir / "model.safetensors").read_bytes() == last.read_bytes()


def test_a_failed_restore_leaves_the_folder_unchanged(model: str, tmp_path: Path) -> None:
    first = train_and_close(make(model, tmp_path))
    second = make(model, tmp_path, optim="sgd", resume_anyway=True)
    with pytest.raises(CheckpointError, match="torch.AdamW"):
        second.train(resume_from_checkpoint="checkpoint-2")
    assert [path.name for path in checkpoints(first.output_dir)] == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert not (first.output_dir / "previous-1").exists() and not (first.output_dir / ".lock").exists()


def test_a_trainer_in_the_folder_of_a_finished_run_replaces_nothing(model: str, tmp_path: Path) -> None:
    first = train_and_close(make(model, tmp_path), save=True)
    before = {path.name: path.read_bytes() for path in first.output_dir.iterdir() if path.is_file()}
    second = make(model, tmp_path)
    second.evaluate()
    with pytest.raises(OutputError, match="contains an earlier run"):
        second.save_model()
    with pytest.raises(OutputError, match="is not empty; .*resume_from_checkpoint"):
        train_and_close(second)
    assert {path.name: path.read_bytes() for path in first.output_dir.iterdir() if path.is_file()} == before


def test_checkpoints_contain_no_secrets(model: str, tmp_path: Path) -> None:
    trainer = train_and_close(make(model, tmp_path, model_init_kwargs={"token": "hf_0123456789"}))
    manifest = (trainer.output_dir / "checkpoint-2" / "manifest.json").read_text()
    assert json.loads(manifest)["options"]["model_init_kwargs"] == {"token": "<TOKEN>"}
    for path in trainer.output_dir.rglob("*"):
        assert not path.is_file() or b"hf_0123456789" not in path.read_bytes(), path
