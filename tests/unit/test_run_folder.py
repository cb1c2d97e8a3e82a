"""What an earlier run left is moved out of the way, completely; a folder that another rank fills is waited for."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.run_folders import holding, write_status

from alignment import SFTConfig
from alignment.checkpoint import run_folder
from alignment.checkpoint.run_folder import RunFolder, check_filled, check_inputs_stay, left_by_earlier_run, set_aside
from alignment.config.errors import DataError, OutputError
from alignment.engines.launch_env import init_distributed
from alignment.run.lock import is_locked

MOVED = (
    *(".checkpoint-12.partial/model.safetensors", "checkpoint-2/model.safetensors", "checkpoint-10/sub/file"),
    *("log.jsonl", "completions.jsonl", "trainer_state.json", "options.json", "report.md", "deepspeed.json"),
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


def aside(folder: Path) -> Path | None:
    return set_aside(folder, left_by_earlier_run(folder))


def test_a_run_is_moved_and_other_files_stay(tmp_path: Path) -> None:
    fill(tmp_path)
    assert aside(tmp_path) == tmp_path / "previous-1"
    assert files(tmp_path) == content(KEPT) | content(MOVED, inside="previous-1/")
    assert aside(tmp_path) is None, "there is only one"
    (tmp_path / "previous-7").mkdir()
    (tmp_path / "previous-mine").mkdir()
    fill(tmp_path, 2, MOVED[:2])
    assert aside(tmp_path) == tmp_path / "previous-8"
    moved = content(MOVED, inside="previous-1/") | content(MOVED[:2], 2, "previous-8/")
    assert files(tmp_path) == content(KEPT) | moved
    assert aside(tmp_path / "new") is None and not (tmp_path / "new").exists()


def test_an_interrupted_move_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off at any rename, it leaves the newest checkpoint or none for a resume; the next call moves the rest."""
    rename = os.rename
    for allowed in range(len(MOVED)):
        folder, left = tmp_path / str(allowed), iter(range(allowed))
        fill(folder)

        def limited(source: Path, target: Path, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise OSError(errno.EBUSY, "Device or resource busy")
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", limited)
            with pytest.raises(OutputError, match=f"^could not move {folder}/.*: Device or resource busy"):
                aside(folder)
        assert {path.name for path in folder.glob("checkpoint-*")} != {"checkpoint-2"}
        assert aside(folder) == folder / "previous-2"
        found = {name.partition("/")[2] if name.startswith("previous-") else name for name in files(folder)}
        assert found == {*MOVED, *KEPT} and len(files(folder)) == len(found)


def test_inputs_of_the_run_stay(tmp_path: Path) -> None:
    """Each is refused if it is the output folder, or a file that would be moved; other files may stay."""
    (tmp_path / "checkpoint-3").mkdir()
    for name in ("log.jsonl", "train.jsonl"):
        (tmp_path / name).touch()
    check_inputs_stay(tmp_path, [("dataset_name", str(tmp_path / "train.jsonl")), ("model", "some/hub-name")])
    for inside in ("checkpoint-3", "checkpoint-3/..", "log.jsonl", "."):
        with pytest.raises(OutputError, match="dataset_name"):
            check_inputs_stay(tmp_path, [("dataset_name", str(tmp_path / inside))])


@pytest.mark.usefixtures("own_process_group")
def test_the_cache_of_another_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared disk may show it late; if it never appears, its host is named."""
    init_distributed(use_cpu=True)
    cache = tmp_path / "cache"
    late = threading.Timer(0.3, (cache / "rows").mkdir, kwargs={"parents": True})
    late.start()
    check_filled(cache, ["rows"], "train_dataset")
    late.join()
    monkeypatch.setattr(run_folder, "_CACHE_S", 0.0)
    with pytest.raises(DataError, match="train_dataset: .* not in the cache of .*give every node the same"):
        check_filled(cache, ["rows", "others"], "train_dataset")


@pytest.mark.usefixtures("own_process_group")
def test_a_run_that_ended_while_its_lock_was_awaited(tmp_path: Path) -> None:
    """Its checkpoints are seen, and not pruned by the next run."""
    init_distributed(use_cpu=True)
    folder = RunFolder(tmp_path / "out", SFTConfig(str(tmp_path / "out")))
    folder.check()
    with holding(tmp_path / "out") as process:

        def end() -> None:
            (tmp_path / "out" / "checkpoint-3").mkdir()
            process.kill()

        ends = threading.Timer(0.5, end)
        ends.start()
        with pytest.raises(OutputError, match="is not empty"):
            folder.enter(None)
        ends.join()
    assert not is_locked(tmp_path / "out") and (tmp_path / "out" / "checkpoint-3").is_dir()


@pytest.mark.parametrize(("job", "restarts", "stays"), [("7", "1", True), ("7", "0", False), ("8", "1", False)])
def test_a_requeued_job_obeys_the_stop_file(
    job: str, restarts: str, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(run_folder, "tell", told.append)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    write_status(tmp_path, job="7")
    (tmp_path / "STOP").touch()
    RunFolder(tmp_path, SFTConfig("out"))._clear_stop_file()
    assert (tmp_path / "STOP").exists() is ("SLURM has requeued" in told[0]) is stays


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "holder", lambda folder: str(folder))
    monkeypatch.setattr(run_folder, "gathered", lambda value: [("other", None), ("node7", value[1])])
    monkeypatch.setattr(run_folder, "_SHARED_S", 0.0)
    (tmp_path / ".lock").touch()
    for owner, folder in ((str(tmp_path), tmp_path), ("another", tmp_path), (str(tmp_path / "a"), tmp_path / "a")):
        monkeypatch.setattr(run_folder, "from_first_rank", lambda value, owner=owner: owner)
        shared = owner == str(tmp_path)
        with (
            contextlib.nullcontext() if shared else pytest.raises(OutputError, match=f"{folder} on node7 is node-loc")
        ):
            run_folder.check_shared_folder(folder)
