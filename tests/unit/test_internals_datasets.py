"""Assumptions of `alignment.internals.datasets`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from conftest import ROOT

from alignment.internals.datasets import cause_of, data_files_by_split, slices, was_saved


def test_splits_are_those_of_load_dataset(tmp_path: Path) -> None:
    for name in ("train-0.csv", "train-1.csv", "dev.csv", "test.csv"):
        (tmp_path / name).write_text(f"text\n{name}\n")
    found = {
        str(split): sorted(Path(file).relative_to(tmp_path).as_posix() for file in files)
        for split, files in data_files_by_split(str(tmp_path)).items()
    }
    loaded = datasets.load_dataset(str(tmp_path))
    assert found == {str(split): sorted(rows["text"]) for split, rows in loaded.items()}
    assert found["validation"] == ["dev.csv"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError):
        data_files_by_split(str(tmp_path / "empty"))


def test_a_saved_folder_is_one_that_load_from_disk_reads(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a"]})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": rows}).save_to_disk(tmp_path / "several")
    for name, kind in {"one": datasets.Dataset, "several": datasets.DatasetDict}.items():
        assert was_saved(tmp_path / name)
        assert isinstance(datasets.load_from_disk(tmp_path / name), kind)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.csv").write_text("text\na\n")
    assert not was_saved(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        datasets.load_from_disk(tmp_path / "other")


@pytest.mark.parametrize("split", ["train", "train[1:3]", "test[-2:]+train[:50%]", "train[10%:40%]+train[2:2]"])
def test_slices_are_those_of_load_dataset(tmp_path: Path, split: str) -> None:
    for name, count in (("train", 10), ("test", 5)):
        (tmp_path / f"{name}.csv").write_text("text\n" + "".join(f"{name} {row}\n" for row in range(count)))
    found = [f"{name} {row}" for name, rows in slices(split, {"train": 10, "test": 5}) for row in rows]
    assert found == list(datasets.load_dataset(str(tmp_path), split=split)["text"])


@pytest.mark.parametrize("split", ["train[", "train[150%:]", "other"])
def test_an_invalid_split(split: str) -> None:
    with pytest.raises((ValueError, AssertionError)):
        slices(split, {"train": 10})


def _torn() -> Iterator[dict[str, Any]]:
    yield {"text": "a"}
    raise ZeroDivisionError("in the middle")


def test_the_error_of_a_generator_is_behind_that_of_the_library() -> None:
    with pytest.raises(Exception) as caught:
        datasets.Dataset.from_generator(_torn)
    assert not isinstance(caught.value, ZeroDivisionError)
    assert isinstance(cause_of(caught.value), ZeroDivisionError)
    with pytest.raises(FileNotFoundError) as other:
        datasets.load_dataset("csv", data_files="nowhere.csv")
    assert cause_of(other.value) is None


def test_the_cache_folder_follows_the_variables(tmp_path: Path) -> None:
    def said(**variables: str) -> str:
        code = "from alignment.internals.datasets import cache_folder; print(cache_folder())"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | variables
        return subprocess.run(
            [sys.executable, "-c", code], check=True, cwd=ROOT, env=environment, capture_output=True, text=True
        ).stdout.strip()

    assert said(HF_DATASETS_CACHE=str(tmp_path / "a")) == str(tmp_path / "a")
    assert said(HF_HOME=str(tmp_path)) == str(tmp_path / "datasets")
