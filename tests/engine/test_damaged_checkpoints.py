"""Checkpoints damaged by a disk or a crash, and disks that fill up during a save."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from data_tokenizers import PLAIN, char_tokenizer
from helpers import make_model, options, unpaired_rows
from small_disk import small_disk
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

from alignment import KTOConfig, KTOTrainer
from alignment.checkpoint import manifest as manifest_module
from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.manifest import MANIFEST, files_in, record_of
from alignment.checkpoint.tensors import TensorFile
from alignment.config.errors import CheckpointError, LastCheckpointError
from alignment.training.checkpointing import writer
from alignment.training.checkpointing.resume import choose

pytestmark = pytest.mark.usefixtures("own_process_group")
STEPS = 6


def make(model: Any, folder: Path, **more: Any) -> KTOTrainer:
    given = options(folder, max_steps=STEPS, save_strategy="steps", save_steps=2, logging_steps=1, **more)
    arguments = {} if isinstance(model, str) else {"processing_class": char_tokenizer(template=PLAIN)}
    return KTOTrainer(model=model, args=KTOConfig(**given), train_dataset=unpaired_rows(12, 3), **arguments)


class Counting(nn.Module):
    """A layer with a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return hidden


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "policy", seed=1)


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    trainer = make(model, tmp_path_factory.mktemp("whole"))
    trainer.train()
    trainer.close()
    return trainer.output_dir


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)


def taken(folder: Path) -> tuple[int, list[str]]:
    """Return the step of the checkpoint that a run would resume from, and the messages."""
    told: list[str] = []
    chosen = choose(folder, "latest", "kto", lambda _: None, told.append)
    assert chosen is not None
    return chosen.step, told


def test_every_missing_and_truncated_file_and_every_flipped_bit_is_detected(whole: Path, tmp_path: Path) -> None:
    """In all files of the newest checkpoint; the previous one is used, and the file is named."""
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    newest = folder / f"checkpoint-{STEPS}"
    rng, names = random.Random(0), [MANIFEST, *files_in(newest)]
    assert len({Path(name).suffix for name in names}) >= 3 and len(names) >= 8
    for number in range(20 * len(names)):
        path = newest / names[number % len(names)]
        content = path.read_bytes()
        if number < len(names):
            path.unlink()
        elif number % 2:
            os.truncate(path, rng.randrange(len(content)))
        else:
            flip(path, rng.randrange(8 * len(content)))
        step, told = taken(folder)
        assert step == STEPS - 2 and path.name in told[0] and len(told) == 1, f"{path.name}: {told}"
        path.write_bytes(content)
    assert taken(folder) == (STEPS, [])


def test_the_files_of_one_checkpoint_are_read(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the others, only the manifests and the sizes of files."""
    read: list[Path] = []
    monkeypatch.setattr(manifest_module, "record_of", lambda path, of=record_of: read.append(path) or of(path))
    monkeypatch.setattr(TensorFile, "__init__", lambda self, path: read.append(path))
    assert taken(whole)[0] == STEPS and len(read) == len(set(read))
    assert {path.parent.name for path in read} == {f"checkpoint-{STEPS}"}


def test_a_run_resumes_from_the_checkpoint_before_the_damaged_one(
    model: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    weights = (whole / f"checkpoint-{STEPS}" / "model.safetensors").read_bytes()
    flip(folder / f"checkpoint-{STEPS}" / "model.safetensors", 8 * len(weights) - 20)
    trainer = make(model, tmp_path)
    trainer.train(resume_from_checkpoint="latest")
    trainer.close()
    said = capsys.readouterr().out
    assert "model.safetensors: the content has changed since it was written" in said
    assert f"moved checkpoint-{STEPS} of later steps to {folder / 'previous-1'}" in said
    assert (folder / f"checkpoint-{STEPS}" / "model.safetensors").read_bytes() == weights
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, STEPS + 1))


def test_checkpoints_of_other_runs_are_ignored(whole: Path, tmp_path: Path, model: str) -> None:
    other = make(model, tmp_path / "other", seed=7)
    other.train()
    other.close()
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    shutil.copytree(other.output_dir / f"checkpoint-{STEPS}", folder / "checkpoint-9")
    step, told = taken(folder)
    assert step == STEPS and len(told) == 1 and str(folder / "checkpoint-9") in told[0]


def test_a_model_only_checkpoint_is_skipped(model: str, whole: Path, tmp_path: Path) -> None:
    trainer = make(model, tmp_path, save_only_model=True)
    trainer.train()
    trainer.close()
    newest = trainer.output_dir / f"checkpoint-{STEPS}"
    assert not any(newest.glob("optimizer*")) and (newest / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="save_only_model"):
        taken(trainer.output_dir)
    shutil.rmtree(trainer.output_dir / "checkpoint-2")
    shutil.copytree(whole / "checkpoint-2", trainer.output_dir / "checkpoint-2")
    assert taken(trainer.output_dir)[0] == 2


# Full disks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "step"),
    [("optimizer-", 2), ("manifest.json", 2), ("run_state.json", 2), ("run_state-00000", 2), ("manifest.json", STEPS)],
)
def test_a_full_disk_costs_one_checkpoint(
    part: str, step: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last one ends the run with an error, after the model has been written."""
    met: list[str] = []

    def watch(module: Any) -> None:
        def opening(path: Any, *more: Any, opened: Any = module.open, **named: Any) -> Any:
            writes = bool(more) and (more[0] & os.O_CREAT if isinstance(more[0], int) else more[0][0] != "r")
            if writes and f".checkpoint-{step}." in str(path) and part in Path(path).name and not met:
                met.append(str(path))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return opened(path, *more, **named)

        monkeypatch.setattr(module, "open", opening)

    watch(io)
    watch(os)
    trainer = make(model, tmp_path)
    with pytest.raises(LastCheckpointError, match="No space") if step == STEPS else contextlib.nullcontext():
        trainer.train()
    assert met and trainer.state.global_step == STEPS
    left = [other for other in (2, 4, 6) if other != step]
    assert [path.name for path in checkpoints(trainer.output_dir)] == [f"checkpoint-{other}" for other in left]
    assert not any(trainer.output_dir.glob(".checkpoint-*"))
    trainer.save_model()
    trainer.close()
    assert (trainer.output_dir / "model.safetensors").is_file() and taken(trainer.output_dir)[0] == left[-1]


def test_space_is_checked_before_anything_is_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(model, tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(LastCheckpointError, match=r"requires 1\.[0-9]* MB, .* 1 kB"):
        trainer.train()
    trainer.close()
    assert checkpoints(trainer.output_dir) == []


class Filling(TrainerCallback):
    """Leaves the given kilobytes of a disk free before each save, and all of it before the last one."""

    def __init__(self, disk: Path, free: list[int]) -> None:
        self.ballast, self.free = disk / "ballast", free

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ballast.unlink(missing_ok=True)
        if state.global_step < len(self.free) + 1:
            room = shutil.disk_usage(self.ballast.parent).free - 1024 * self.free[state.global_step - 1]
            self.ballast.write_bytes(bytes(room))


def test_a_disk_that_fills_up_at_every_save(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the log, model, optimizer state, run state or manifest: only that checkpoint is lost."""
    monkeypatch.setattr(writer, "_SPARE", -(1 << 30))  # disables the check before writing
    with small_disk(tmp_path / "disk", 4000) as disk:
        trainer = make(model, disk, save_total_limit=1)
        trainer.args.save_steps = 1
        trainer.add_callback(Filling(disk, [2000, 0, 40, 120, 250]))
        trainer.train()
        trainer.close()
        said = capsys.readouterr().out
        failed = [step for step in range(1, 7) if f"checkpoint-{step}: could not be written" in said]
        assert failed == [2, 3, 4, 5]
        assert [path.name for path in checkpoints(trainer.output_dir)] == [f"checkpoint-{STEPS}"]
        assert taken(trainer.output_dir)[0] == STEPS
        lines = [json.loads(line) for line in (trainer.output_dir / "log.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))


def test_a_buffer_that_training_changes_is_restored(tmp_path: Path) -> None:
    """Including one that is not saved with the model."""
    path = make_model(tmp_path / "model", seed=1)

    def counting() -> Any:
        live = AutoModelForCausalLM.from_pretrained(path)
        live.model.norm = nn.Sequential(live.model.norm, Counting())
        return live

    seen = []
    for name in ("whole", "again"):
        live = counting()
        trainer = make(live, tmp_path / name)
        if name == "again":
            shutil.copytree(tmp_path / "whole" / "out", trainer.output_dir)
            for step in (4, 6):
                shutil.rmtree(trainer.output_dir / f"checkpoint-{step}")
        trainer.train(resume_from_checkpoint=name == "again")
        seen.append(float(live.model.norm[1].seen))
        trainer.close()
    assert seen[0] > 0 and seen[0] == seen[1]
