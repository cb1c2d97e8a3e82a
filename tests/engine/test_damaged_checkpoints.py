"""Checkpoints damaged by a disk or a crash, and disks that fill up during a save."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_tokenizers import PLAIN, char_tokenizer
from drivers.canned import LONGEST
from helpers import make_model, options, paired_rows, unpaired_rows
from small_disk import small_disk
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

import alignment
from alignment.checkpoint import writer
from alignment.checkpoint.folder import checkpoints
from alignment.checkpoint.manifest import MANIFEST, Manifest, files_in
from alignment.checkpoint.resume import choose, find
from alignment.config.errors import CheckpointError, LastCheckpointError
from alignment.training.trainer import AlignmentTrainer

pytestmark = pytest.mark.usefixtures("own_process_group")
STEPS = 6


def count_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def make(model: Any, folder: Path, method: str = "KTO", **more: Any) -> AlignmentTrainer:
    given = options(folder, max_steps=STEPS, save_strategy="steps", save_steps=2, logging_steps=1, **more)
    arguments: dict[str, Any] = {"train_dataset": unpaired_rows(12, 3)}
    if method == "OnlineDPO":
        del given["max_prompt_length"]
        given |= {"max_new_tokens": LONGEST, "log_completions": 1}
        arguments = {"train_dataset": [{"prompt": row["prompt"]} for row in paired_rows(12)]}
        arguments |= {"reward_funcs": count_letters}
    config = getattr(alignment, f"{method}Config")(**given)
    if not isinstance(model, str):
        arguments["processing_class"] = char_tokenizer(template=PLAIN)
    made: AlignmentTrainer = getattr(alignment, f"{method}Trainer")(model=model, args=config, **arguments)
    return made


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


def truncate(path: Path, at: int) -> None:
    os.truncate(path, at)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at // 8] ^= 1 << at % 8
    path.write_bytes(content)


def taken(folder: Path, method: str = "kto") -> tuple[int, list[str]]:
    """Return the step of the checkpoint that a run would resume from, and the messages."""
    told: list[str] = []
    chosen = choose(folder, "latest", method, lambda _: None, told.append)
    assert chosen is not None
    return chosen.step, told


def test_every_truncated_file_and_every_flipped_bit_is_detected(whole: Path, tmp_path: Path) -> None:
    """100 of each, over all files of the newest checkpoint; the previous one is used, and the file is named."""
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    newest = folder / f"checkpoint-{STEPS}"
    assert taken(folder) == (STEPS, [])
    rng, names = random.Random(0), [MANIFEST, *files_in(newest)]
    assert len({Path(name).suffix for name in names}) >= 3 and len(names) >= 8
    for number in range(200):
        path = newest / names[number // 2 % len(names)]
        content = path.read_bytes()
        truncated = number % 2 == 0
        if truncated:
            truncate(path, rng.randrange(len(content)))
        else:
            flip(path, rng.randrange(8 * len(content)))
        step, told = taken(folder)
        assert step == STEPS - 2 and path.name in told[0] and len(told) == 1, f"{path.name}: {told}"
        path.write_bytes(content)
    assert taken(folder) == (STEPS, [])


def test_a_missing_file_is_detected(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    newest = folder / f"checkpoint-{STEPS}"
    for name in [MANIFEST, *files_in(newest)]:
        hidden = (newest / name).rename(tmp_path / "hidden")
        step, told = taken(folder)
        assert step == STEPS - 2 and name in told[0]
        hidden.rename(newest / name)


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


def test_no_run_starts_over_damaged_checkpoints(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(whole, folder)
    for path in checkpoints(folder):
        truncate(path / "run_state.json", 3)
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be resumed from") as refused:
        taken(folder)
    assert str(refused.value).count("run_state.json: has 3 bytes") == len(checkpoints(folder))


def test_only_the_chosen_checkpoint_is_read(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once. Of the others, the manifests."""
    opened: list[Path] = []
    open_file = io.open

    def recorded(path: Any, *more: Any, **named: Any) -> Any:
        opened.append(Path(path))
        return open_file(path, *more, **named)

    monkeypatch.setattr("builtins.open", recorded)
    find(whole, "latest", "kto")
    assert not opened
    assert taken(whole) == (STEPS, [])
    newest = whole / f"checkpoint-{STEPS}"
    assert sorted(opened) == sorted(newest / name for name in files_in(newest))


def test_a_model_only_checkpoint_is_skipped(model: str, whole: Path, tmp_path: Path) -> None:
    trainer = make(model, tmp_path, save_only_model=True)
    trainer.train()
    trainer.close()
    newest = trainer.output_dir / f"checkpoint-{STEPS}"
    assert not any(newest.glob("optimizer*")) and (newest / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match="contains only the model"):
        taken(trainer.output_dir)
    shutil.copytree(whole / "checkpoint-2", tmp_path / "kept")
    manifest = Manifest.read(newest)
    shutil.rmtree(trainer.output_dir / "checkpoint-2")
    (tmp_path / "kept").rename(trainer.output_dir / "checkpoint-2")
    assert manifest.resumable is False and taken(trainer.output_dir)[0] == 2


# Full disks ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_space(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], list[str]]:
    """``no_space(part, times)``: opening a checkpoint file whose path contains ``part`` fails ``times`` times."""

    def fail(part: str, times: int) -> list[str]:
        met: list[str] = []

        def watch(module: Any) -> None:
            opened = module.open

            def opening(path: Any, *more: Any, **named: Any) -> Any:
                text = "" if isinstance(path, int) else os.fspath(path)
                writes = bool(more) and (more[0] & os.O_CREAT if isinstance(more[0], int) else more[0] != "r")
                if part in str(text) and ".checkpoint-" in str(text) and writes and len(met) < times:
                    met.append(str(text))
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), text)
                return opened(path, *more, **named)

            monkeypatch.setattr(module, "open", opening)

        watch(os)
        watch(io)
        return met

    return fail


@pytest.mark.parametrize("part", ["optimizer-", "manifest.json", "run_state.json", "run_state-00000"])
def test_a_full_disk_costs_one_checkpoint(
    part: str, model: str, tmp_path: Path, no_space: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    met = no_space(part, 1)
    trainer = make(model, tmp_path)
    trainer.train()
    trainer.close()
    said = capsys.readouterr().out
    assert len(met) == 1
    assert said.count("checkpoint-2: could not be written: No space left on device") == 1
    assert [path.name for path in checkpoints(trainer.output_dir)] == ["checkpoint-4", "checkpoint-6"]
    assert not any(trainer.output_dir.glob(".checkpoint-*"))
    assert taken(trainer.output_dir)[0] == STEPS


def test_only_the_last_checkpoint_ends_a_run_with_an_error(model: str, tmp_path: Path, no_space: Any) -> None:
    trainer = make(model, tmp_path)
    met = no_space("checkpoint-6", 1)
    with pytest.raises(LastCheckpointError, match="No space left on device"):
        trainer.train()
    assert len(met) == 1 and trainer.state.global_step == STEPS
    assert [path.name for path in checkpoints(trainer.output_dir)] == ["checkpoint-2", "checkpoint-4"]
    trainer.save_model()
    trainer.close()
    assert (trainer.output_dir / "model.safetensors").is_file()


def test_space_is_checked_before_anything_is_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make(model, tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(LastCheckpointError, match=r"requires 1\.[0-9]*MB, but .* has only 1.00kB of free space"):
        trainer.train()
    trainer.close()
    assert checkpoints(trainer.output_dir) == []
    assert capsys.readouterr().out.count("could not be written: requires") == STEPS // 2


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
        assert [f"checkpoint-{step}: could not be written" in said for step in range(1, 7)] == [
            False,
            *[True] * 4,
            False,
        ]
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
