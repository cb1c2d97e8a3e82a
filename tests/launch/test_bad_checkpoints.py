"""Impossible resumes: one line, exit status 1, before a model is loaded and without changes on disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bad_case import Case
from support.bad_commands import command, in_folder, write_models
from support.helpers import exit_status, make_model, paired_rows, unpaired_rows
from support.run_folders import holding
from support.small_disk import fill, small_disk
from test_bad_input import left, the_error, tree

from alignment.checkpoint.manifest import MANIFEST
from alignment.cli.train import main

pytestmark = pytest.mark.usefixtures("own_process_group", "library_bars")
GOOD = {"per_device_train_batch_size": 4, "max_steps": 4, "save_steps": 2, "disable_tqdm": "true"}
LATEST = {**GOOD, "resume_from_checkpoint": "latest"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("models"))
    make_model(folder / "other", seed=5)
    return folder


@pytest.fixture(scope="module")
def done(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run."""
    folder = tmp_path_factory.mktemp("done")
    assert exit_status(main, command(Case("good", (), GOOD), folder, models)) == 0
    return folder / "out"


def newer_format(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))


def missing_rank(folder: Path) -> None:
    (folder / "optimizer-00001-of-00001.safetensors").unlink()


def truncated_manifest(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 100)


def cases() -> Iterator[tuple[Case, Callable[[Path], None] | None]]:
    """Yield bad resumes, and what happened to both checkpoints before."""
    named = {**GOOD, "resume_from_checkpoint": "checkpoint-4"}
    pairs = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in paired_rows(8)]
    other = {**LATEST, "learning_rate": "1e-3", "beta": "0.3"}
    yield Case("a file", ("no such folder",), {**named, "resume_from_checkpoint": "@data.jsonl"}), None
    yield Case("no such step", ("mean 'checkpoint-4'",), {**named, "resume_from_checkpoint": "checkpoint-5"}), None
    yield Case("an output folder", ("no manifest.json",), {**named, "resume_from_checkpoint": "@out"}), None
    yield Case("a model", ("good: not a checkpoint",), {**named, "resume_from_checkpoint": "%good"}), None
    yield Case("another method", ("method kto", "is cpo"), {**named, "beta": "0.1"}, pairs, method="cpo"), None
    yield Case("newer format", ("checkpoint-4/manifest.json: format 2 is newer",), LATEST), newer_format
    yield Case("missing rank", ("optimizer-00001-of-00001.safetensors: missing",), LATEST), missing_rank
    yield Case("truncated manifest", ("checkpoint-4/manifest.json: cannot be read",), LATEST), truncated_manifest
    yield Case("truncated manifest by name", ("cannot be read",), named), truncated_manifest
    yield Case("no checkpoint left", ("contains a model but no checkpoint",), LATEST), shutil.rmtree
    yield Case("another window", ("had 4; set",), {**LATEST, "per_device_train_batch_size": "2"}), None
    yield Case("other rows", ("data was 8 rows",), LATEST, unpaired_rows(8, seed=9)), None
    yield Case("another model", ("model was ",), LATEST, model="other"), None
    yield Case("other options", ("beta was 0.1, is 0.3; learning_rate was 1e-06, is 0.001",), other), None
    yield Case("fewer steps", ("number of steps was 4, is 3",), {**LATEST, "max_steps": "3"}), None
    yield Case("begun over", ("is not empty", "resume_from_checkpoint"), GOOD), None


CASES = list(cases())


@pytest.mark.parametrize(("case", "damage"), CASES, ids=[case.name.replace(" ", "-") for case, _ in CASES])
def test_an_impossible_resume(
    case: Case,
    damage: Callable[[Path], None] | None,
    done: Path,
    models: Path,
    loads: list[Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(done, tmp_path / "out")
    for folder in (tmp_path / "out").glob("checkpoint-*") if damage else ():
        damage(folder)
    argv = command(case, tmp_path, models)
    before = tree(tmp_path)
    code, _, err = left(capfd, argv)
    line = the_error(err)
    assert code == 1 and loads == []
    for said in case.says:
        assert in_folder(said, tmp_path) in line
    assert tree(tmp_path) == before


def test_the_differences_can_be_overridden(
    done: Path, models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(done, tmp_path / "out")
    longer = {**LATEST, "learning_rate": "1e-3", "resume_anyway": "true", "max_steps": "6"}
    code, out, _ = left(capfd, command(Case("anyway", (), longer), tmp_path, models))
    assert code == 0
    assert "resume_anyway: learning_rate was 1e-06, is 0.001" in out
    assert "total steps changed from 4 to 6" in out and "learning rate is now 0.0003333" in out
    assert (tmp_path / "out" / "checkpoint-6").is_dir()


def test_the_same_command_starts_and_resumes(models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = command(Case("latest", (), LATEST), tmp_path, models)
    for said in ("; starting a new run", "checkpoint-4, after step 4 of 4"):
        code, out, _ = left(capfd, argv)
        assert code == 0 and said in out
        (tmp_path / "out" / ".checkpoint-9.partial").mkdir()
    left(capfd, argv)
    assert not any((tmp_path / "out").glob(".*"))
    events = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if "event" in event] == ["start", "resume", "end"]
    assert not (tmp_path / "out" / ".lock").exists()


def test_two_runs_in_one_folder(
    done: Path, models: Path, loads: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(done, tmp_path / "out")
    with holding(tmp_path / "out") as holder:
        for options in (LATEST, {**GOOD, "overwrite_output_dir": "true"}):
            code, _, err = left(capfd, command(Case("second", (), options), tmp_path, models))
            assert code == 1 and f"process {holder.pid} on" in the_error(err)
        assert loads == [] and (tmp_path / "out" / "checkpoint-4").is_dir()
    left(capfd, command(Case("second", (), LATEST), tmp_path, models))  # after it has exited
    assert loads != []


@pytest.mark.parametrize("state", ["read-only", "full"])
def test_a_disk_that_cannot_be_written(
    state: str, done: Path, models: Path, loads: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "out", 4000) as out:
        shutil.copytree(done, out, dirs_exist_ok=True)
        if state == "read-only":
            subprocess.run(["mount", "-o", "remount,ro", str(out)], check=True)
        else:
            fill(out)
        argv = command(Case(state, (), LATEST), tmp_path, models)
        before = tree(out)
        code, _, err = left(capfd, argv)
        line = the_error(err)
        assert code == 1 and str(out) in line
        assert ("Read-only file system" if state == "read-only" else "No space left on device") in line
        assert loads == [] and tree(out) == before
