"""Streamed data: the required number of rows is written to disk, identical to those of a list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from support.helpers import unpaired_rows

from alignment import KTOConfig, KTOTrainer
from alignment.config.errors import DataError
from alignment.data.sources import dataset_from_python, from_stream

COLUMNS = ("prompt", "completion", "label")


def endless() -> Iterator[dict[str, Any]]:
    """Endless rows, with an unused column that JSON does not support."""
    number = 0
    while True:
        for row in unpaired_rows(50, seed=number):
            yield {**row, "other": {1, 2}}
        number += 1


def stream_of(rows: list[Any]) -> IterableDataset:
    """A stream of exactly these values."""
    return IterableDataset.from_generator(lambda: iter(rows))


def test_the_first_rows_equal_those_of_a_list(tmp_path: Path) -> None:
    made = from_stream(IterableDataset.from_generator(endless), 7, COLUMNS, "data", tmp_path)
    assert made.to_list() == unpaired_rows(50)[:7]
    assert made.features == dataset_from_python(unpaired_rows(7)).features
    assert list(tmp_path.iterdir()) == []
    assert from_stream(stream_of(unpaired_rows(3)), 7, COLUMNS, "data", tmp_path).to_list() == unpaired_rows(3)


def test_values_are_kept_exactly(tmp_path: Path) -> None:
    rows = [{"prompt": "2020-01-01", "label": True}, {"prompt": [{"role": "user", "content": "x"}], "label": None}]
    assert from_stream(stream_of(rows), 9, COLUMNS, "data", tmp_path).to_list() == rows


def test_a_stream_of_a_stored_dataset(tmp_path: Path) -> None:
    stream = Dataset.from_list(unpaired_rows(9)).to_iterable_dataset(num_shards=3).shuffle(seed=1).with_format("numpy")
    expected = Dataset.from_list(unpaired_rows(9)).to_iterable_dataset(num_shards=3).shuffle(seed=1)
    assert from_stream(stream, 5, COLUMNS, "data", tmp_path).to_list() == list(expected.take(5))


def test_all_columns_that_json_supports(tmp_path: Path) -> None:
    """For reward functions, which get every other column."""
    rows = Dataset.from_list([{**row, "raw": b"0", "more": 1} for row in unpaired_rows(3)])
    assert from_stream(rows.to_iterable_dataset(), 2, None, "data", tmp_path).to_list() == [
        {**row, "more": 1} for row in unpaired_rows(3)[:2]
    ]


def broken() -> Iterator[dict[str, Any]]:
    yield from unpaired_rows(2)
    raise OSError("the line\nwas cut")


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (stream_of([]), "contains no rows with usable columns"),
        (stream_of([{"other": 1}]), "contains no rows"),
        (IterableDataset.from_generator(broken), "the stream failed after row 2: the line was cut"),
        (
            stream_of([*unpaired_rows(2), {"prompt": {1}}]),
            r"row 3: prompt is .1. \(of type set\), which cannot be stored: .* use values that JSON supports",
        ),
    ],
)
def test_unusable_streams(stream: IterableDataset, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^data[:,]? {said}"):
        from_stream(stream, 9, COLUMNS, "data", tmp_path)
    assert list(tmp_path.iterdir()) == []


def trainer_of(model: str, out: Path, evaluation: Any = None, **options: Any) -> KTOTrainer:
    """A trainer over an endless stream."""
    args = KTOConfig(str(out), max_length=96, per_device_train_batch_size=2, gradient_accumulation_steps=2, **options)
    stream = IterableDataset.from_generator(endless)
    return KTOTrainer(model=model, args=args, train_dataset=stream, eval_dataset=evaluation)


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"max_steps": 3}, 12),
        ({"max_steps": 3, "max_train_samples": 5}, 5),
        ({"max_train_samples": 20}, 20),
        ({"max_steps": 3, "max_train_samples": 20}, 12),
    ],
)
def test_rows_that_are_used(model: str, tmp_path: Path, options: dict[str, Any], rows: int) -> None:
    data = trainer_of(model, tmp_path / "out", **options).data.train
    assert data.report.rows_in == rows


def test_a_stream_of_unknown_length_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^train_dataset: is an IterableDataset, .* set max_steps \(or max_train_sa"):
        trainer_of(model, tmp_path / "out")
    whole = trainer_of(model, tmp_path / "out", stream_of(unpaired_rows(30)), max_steps=2).data.eval
    assert whole[""].report.rows_in == 30  # read to its end
    data = trainer_of(model, tmp_path / "out", stream_of(unpaired_rows(30)), max_steps=2, max_eval_samples=6).data.eval
    assert data[""].report.rows_in == 6
