"""What `alignment.internals.datasets` relies on."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from alignment.internals.datasets import data_files_by_split


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


def test_a_folder_without_data_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        data_files_by_split(str(tmp_path))
