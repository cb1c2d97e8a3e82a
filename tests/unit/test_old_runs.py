"""An earlier run is moved out of the way completely, even by an interrupted call."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from alignment.checkpoint.old_runs import set_aside, set_folder_aside
from alignment.config.errors import OutputError

MOVED = (
    *("checkpoint-2/model.safetensors", "checkpoint-10/model.safetensors", "checkpoint-10/sub/file"),
    *(".checkpoint-12.partial/model.safetensors", "log.jsonl", "completions.jsonl", "trainer_state.json"),
    *("options.json", "report.md", "report.html", "deepspeed.json"),
    *("model.safetensors", "config.json", "tokenizer_config.json", "chat_template.jinja", "README.md"),
)
KEPT = (".lock", "notes.txt", "reports/mine", "train.jsonl")


def fill(folder: Path, run: int = 1, names: tuple[str, ...] = (*MOVED, *KEPT)) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} of run {run}")


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def content(names: tuple[str, ...], run: int = 1, inside: str = "") -> dict[str, str]:
    return {f"{inside}{name}": f"{name} of run {run}" for name in names}


def test_a_run_is_moved_and_other_files_stay(tmp_path: Path) -> None:
    fill(tmp_path)
    assert set_aside(tmp_path) == tmp_path / "previous-1"
    assert files(tmp_path) == content(KEPT) | content(MOVED, inside="previous-1/")
    assert set_aside(tmp_path) is None, "there is only one"
    (tmp_path / "previous-7").mkdir()
    (tmp_path / "previous-mine").mkdir()
    fill(tmp_path, 2, MOVED[:2])
    assert set_aside(tmp_path) == tmp_path / "previous-8"
    moved = content(MOVED, inside="previous-1/") | content(MOVED[:2], 2, "previous-8/")
    assert files(tmp_path) == content(KEPT) | moved


def test_nothing_to_move(tmp_path: Path) -> None:
    assert set_aside(tmp_path / "new") is None and not (tmp_path / "new").exists()
    fill(tmp_path, names=KEPT)
    assert set_aside(tmp_path) is None and files(tmp_path) == content(KEPT)
    (tmp_path / ".previous-partial").mkdir()
    assert set_aside(tmp_path) is None and files(tmp_path) == content(KEPT)
    assert not (tmp_path / ".previous-partial").exists()


class Killed(BaseException):
    """Ends the process, as far as the disk is concerned."""


def killed_at(monkeypatch: pytest.MonkeyPatch, folder: Path, renames: int) -> bool:
    """Call it and kill it at a rename; return whether it was killed."""
    done, rename = [], os.rename

    def counted(source: Path, target: Path) -> None:
        if len(done) == renames:
            raise Killed
        done.append(source.name)
        rename(source, target)
        if done[-1].startswith("checkpoint-"):
            steps = [int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")]
            assert steps in ([], [10]), "a resume finds the newest or none"

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", counted)
        try:
            set_aside(folder)
        except Killed:
            return True
    return False


def test_an_interrupted_call_is_completed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renames = 0
    while True:
        folder = tmp_path / str(renames)
        fill(folder)
        if not killed_at(monkeypatch, folder, renames):
            break
        assert killed_at(monkeypatch, folder, 0), "twice, with nothing done the second time"
        assert set_aside(folder) == folder / "previous-1"
        assert files(folder) == content(KEPT) | content(MOVED, inside="previous-1/")
        renames += 1
    assert renames == 16, "fifteen names and the folder's own"


def test_a_run_between_two_calls_is_kept_separate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    assert killed_at(monkeypatch, tmp_path, 15), "all but the last name"
    fill(tmp_path, 2, MOVED)
    assert set_aside(tmp_path) == tmp_path / "previous-2"
    moved = content(MOVED, inside="previous-1/") | content(MOVED, 2, "previous-2/")
    assert files(tmp_path) == content(KEPT) | moved


def test_files_that_cannot_be_moved_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(source: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    fill(tmp_path)
    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(OutputError) as caught:
        set_aside(tmp_path)
    assert str(caught.value) == (
        f"output_dir: could not move {tmp_path}/checkpoint-2 of the earlier run: Device or resource "
        "busy; move it manually, or choose another output_dir"
    )
    assert {name: text for name, text in files(tmp_path).items() if not name.startswith("previous")} == content(
        (*MOVED, *KEPT)
    )


def test_a_folder_next_to_earlier_ones(tmp_path: Path) -> None:
    folder = tmp_path / "merged"
    assert set_folder_aside(folder) is None
    for number in (1, 2):
        folder.mkdir()
        assert set_folder_aside(folder) is None
        (folder / "model").write_text(str(number))
        assert set_folder_aside(folder) == tmp_path / f"merged.previous-{number}"
    assert not folder.exists() and (tmp_path / "merged.previous-2" / "model").read_text() == "2"
