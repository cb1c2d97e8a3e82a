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
from support.helpers import options, train_and_close, unpaired_rows

from alignment import KTOConfig, KTOTrainer
from alignment.checkpoint import manifest as manifest_module
from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.manifest import MANIFEST, Manifest, files_in, record_of
from alignment.checkpoint.resume import choose
from alignment.config.errors import CheckpointError, LastCheckpointError

pytestmark = pytest.mark.usefixtures("own_process_group")
STEPS = 6


def make(model: str, folder: Path, **more: Any) -> KTOTrainer:
    given = options(folder, max_steps=STEPS, save_strategy="steps", save_steps=2, logging_steps=1, **more)
    return KTOTrainer(model=model, args=KTOConfig(**given), train_dataset=unpaired_rows(12, 3))


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    return train_and_close(make(model, tmp_path_factory.mktemp("whole"))).output_dir


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)


def taken(folder: Path) -> tuple[int, list[str]]:
    """Return the step of the checkpoint that a run would resume from, and the messages."""
    current = Manifest.read(next(path for path in checkpoints(folder) if (path / MANIFEST).exists()))
    with contextlib.redirect_stdout(io.StringIO()) as told:
        chosen = choose(folder, "latest", current, anyway=False)
    return chosen.step, told.getvalue().splitlines()


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
    assert taken(whole)[0] == STEPS and len(read) == len(set(read))
    assert {path.parent.name for path in read} == {f"checkpoint-{STEPS}"}


def test_a_run_resumes_from_the_checkpoint_before_the_damaged_one(
    model: str, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    weights = (whole / f"checkpoint-{STEPS}" / "model.safetensors").read_bytes()
    flip(folder / f"checkpoint-{STEPS}" / "model.safetensors", 8 * len(weights) - 20)
    train_and_close(make(model, tmp_path), resume_from_checkpoint="latest")
    said = capsys.readouterr().out
    assert "model.safetensors: the content has changed since it was written" in said
    assert f"moved checkpoint-{STEPS} of later steps to {folder / 'previous-1'}" in said
    assert (folder / f"checkpoint-{STEPS}" / "model.safetensors").read_bytes() == weights
    steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if "loss" in line] == list(range(1, STEPS + 1))


def test_a_model_only_checkpoint_is_skipped(model: str, whole: Path, tmp_path: Path) -> None:
    trainer = train_and_close(make(model, tmp_path, save_only_model=True))
    newest = trainer.output_dir / f"checkpoint-{STEPS}"
    assert not any(newest.glob("optimizer*")) and (newest / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="save_only_model"):
        taken(trainer.output_dir)
    shutil.rmtree(trainer.output_dir / "checkpoint-2")
    shutil.copytree(whole / "checkpoint-2", trainer.output_dir / "checkpoint-2")
    assert taken(trainer.output_dir)[0] == 2


@pytest.mark.parametrize(("part", "step"), [("model", 2), ("optimizer-", 2), ("run_state", 2), ("manifest", STEPS)])
def test_a_full_disk_costs_one_checkpoint(
    part: str, step: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last one ends the run with an error, after the model has been written."""
    full, flush = [], os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.parent.name == f".checkpoint-{step}.partial" and part in path.name and not full:
            full.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    trainer = make(model, tmp_path)
    with pytest.raises(LastCheckpointError, match="No space") if step == STEPS else contextlib.nullcontext():
        trainer.train()
    assert full and trainer.state.global_step == STEPS
    left = [other for other in (2, 4, 6) if other != step]
    assert [path.name for path in checkpoints(trainer.output_dir)] == [f"checkpoint-{other}" for other in left]
    assert not any(trainer.output_dir.glob(".checkpoint-*"))
    trainer.save_model()
    trainer.close()
    assert (trainer.output_dir / "model.safetensors").is_file() and taken(trainer.output_dir)[0] == left[-1]
