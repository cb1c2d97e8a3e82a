"""Reading files, folders and Python objects: exact values, and errors that name file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDatasetDict

from alignment.config.errors import DataError
from alignment.data import readers, sources
from alignment.data.sources import dataset_from_python, load_split

ROWS = [{"prompt": f"p{i}", "completion": f"c{i}", "label": i % 2 == 0} for i in range(5)]


def write(path: Path, *rows: Any) -> str:
    """Write JSON Lines; strings are written unchanged."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return str(path)


def refused(name: str, split: str = "train", config: str | None = None) -> str:
    with pytest.raises(DataError) as caught:
        load_split(name, config, split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet", "arrow"])
def test_every_file_kind(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif suffix == "jsonl":
        write(path, *ROWS)
    elif suffix == "csv":
        path.write_text("prompt,completion,label\n" + "".join(f"p{i},c{i},{i % 2 == 0}\n" for i in range(5)))
    elif suffix == "parquet":
        Dataset.from_list(ROWS).to_parquet(str(path))
    else:
        Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    dataset = load_split(str(path), None, "train")
    assert dataset.to_list() == ROWS


def test_slices_and_missing_splits(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *ROWS)
    assert load_split(path, None, "train[1:3]").to_list() == ROWS[1:3]
    assert load_split(path, None, "train[:1]+train[-1:]").to_list() == [ROWS[0], ROWS[4]]
    assert refused(path, "test") == f"{path}: split 'test' does not exist; available: train"
    assert "split 'train[:x]' is not valid" in refused(path, "train[:x]")
    assert "contains no rows" in refused(path, "train[:0]")


def test_folders(tmp_path: Path) -> None:
    saved = Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "one"))
    DatasetDict(train=saved, test=saved.select([1])).save_to_disk(str(tmp_path / "two"))
    (tmp_path / "three").mkdir()
    write(tmp_path / "three" / "train-0.jsonl", *ROWS[:2])
    write(tmp_path / "three" / "train-1.jsonl", *ROWS[2:])
    write(tmp_path / "three" / "test.jsonl", ROWS[3])
    (tmp_path / "three" / "README.md").write_text("about")
    assert load_split(str(tmp_path / "one"), None, "train").to_list() == ROWS
    assert load_split(str(tmp_path / "two"), None, "test").to_list() == [ROWS[1]]
    assert load_split(str(tmp_path / "three"), None, "train").to_list() == ROWS
    assert load_split(str(tmp_path / "three"), None, "test").to_list() == [ROWS[3]]
    assert refused(str(tmp_path / "two"), "eval").endswith("split 'eval' does not exist; available: train, test")
    assert "remove it" in refused(str(tmp_path / "two"), config="en")
    (tmp_path / "four").mkdir()
    assert "contains neither a saved dataset nor data files" in refused(str(tmp_path / "four"))
    (tmp_path / "three" / "train-2.csv").write_text("prompt\n1\n")
    assert "the split mixes .csv, .jsonl files; use a single file type" in refused(str(tmp_path / "three"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([ROWS[0], ROWS[1], '{"prompt": "p", "compl'], "line 3: invalid JSON: Unterminated string"),
        ([ROWS[0], "", "", '{"prompt": 1,}'], "line 4: invalid JSON"),
        ([json.dumps(ROWS[0]) * 2], "line 1: invalid JSON: Extra data"),
        ([ROWS[0], "[1, 2]"], r"line 2: the row is \[1, 2\] \(a list\); expected an object"),
        ([ROWS[0], '{"score": NaN}'], "line 2: invalid JSON: NaN is not a JSON value"),
        ([ROWS[0], r'{"prompt": "\ud83d"}'], "line 2: a string contains an unpaired surrogate"),
        (["{", '"prompt": "p"', "}"], "line 1: invalid JSON: .*one object per line"),
        ([ROWS[0], '{"a": {"b": 1, "b": 2}}'], "line 2: invalid JSON: an object with the keys b, b has one of them"),
    ],
)
def test_truncated_lines_are_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    path = write(tmp_path / "data.jsonl", *lines)
    assert re.match(f"{re.escape(path)}, {message}", refused(path))


def test_truncated_json_list_and_wrong_encoding(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text('[\n{"prompt": "a"},\n{"prompt": "b"\n')
    assert refused(str(path)).startswith(f"{path}, line 3: invalid JSON")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n')
    assert refused(str(latin)).startswith(f"{latin}, line 2: not UTF-8 text")


def test_values_are_kept_exactly(tmp_path: Path) -> None:
    rows = [
        {"prompt": "2020-01-01", "completion": "1", "label": True, "meta": "true", "n": 1},
        {"prompt": "2021-01-01 10:00:00", "completion": "null", "label": False, "meta": True, "n": 2.5},
        {"prompt": "\ufeff\u2028x\x00", "completion": '{"a": 1}', "label": True, "meta": {"b": [1, None]}, "n": None},
    ]
    dataset = load_split(write(tmp_path / "data.jsonl", *rows), None, "train")
    assert dataset.to_list() == rows
    assert [type(value) for value in dataset["meta"]] == [str, bool, dict]
    assert dataset_from_python(rows).to_list() == rows
    messages = [{"chosen": [{"role": "user", "content": "2020-01-01"}]}, {"chosen": [{"role": "tool", "x": 1}]}]
    assert load_split(write(tmp_path / "chat.jsonl", *messages), None, "train").to_list() == messages


def test_csv_has_no_guessed_types(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text('prompt,completion,label\n1,NA,True\n"a, ""b""\nc",,false\n')
    expected = [
        {"prompt": "1", "completion": "NA", "label": True},
        {"prompt": 'a, "b"\nc', "completion": "", "label": False},
    ]
    assert load_split(str(path), None, "train").to_list() == expected
    for delimiter in ";\t":
        path.write_text(f"prompt{delimiter}label\na,b{delimiter}True\nc{delimiter}up\n")
        found = [{"prompt": "a,b", "label": True}, {"prompt": "c", "label": "up"}]
        assert load_split(str(path), None, "train").to_list() == found
    for content, message in [
        ("prompt,completion,label\na,b\n", "line 2: the row has 2 cells, but the header has 3"),
        ("prompt,prompt\na,b\n", "line 1: the header contains column 'prompt' twice"),
        ('prompt,completion\na,"b\n', "line 2: invalid CSV"),
    ]:
        path.write_text(content)
        assert refused(str(path)).startswith(f"{path}, {message}")


@pytest.mark.parametrize("text", ['{"data": [{"a": "b"}, {"a": "c"}]}', '{\n "data": [\n {"a": "b"},\n {"a": "c"}]}'])
def test_rows_in_an_object_with_data(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert load_split(str(path), None, "train").to_list() == [{"a": "b"}, {"a": "c"}]
    path.write_text('{"prompt": "p", "data": [{"a": "b"}]}')  # a row that has such a column
    assert load_split(str(path), None, "train").to_list() == [{"prompt": "p", "data": [{"a": "b"}]}]


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_known_file_is_not_parsed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    path, parsed = tmp_path / f"data.{suffix}", []
    rows = [{**row, "seed": str(tmp_path)} for row in ROWS]  # content that no cache has
    if suffix == "jsonl":
        write(path, *rows)
    else:
        Dataset.from_list(rows).to_csv(str(path), index=False)
    read = readers.read_rows

    def counted(path: Path) -> Any:
        for row in read(path):
            parsed.append(row)
            yield row

    monkeypatch.setattr(readers, "read_rows", counted)
    monkeypatch.setattr(sources, "read_rows", counted)
    first = load_split(str(path), None, "train")
    assert len(parsed) == 2 * len(rows)  # to infer types, and to store them
    renamed = path.rename(tmp_path / f"renamed.{suffix}")
    again = load_split(str(renamed), None, "train")
    assert len(parsed) == 2 * len(rows) and again.to_list() == first.to_list() == rows
    assert (again.features, again._fingerprint) == (first.features, first._fingerprint)
    renamed.write_text(renamed.read_text().replace("p4", "p5"))
    changed = load_split(str(renamed), None, "train")
    assert changed.to_list()[4]["prompt"] == "p5" and changed._fingerprint != first._fingerprint


def test_python_objects() -> None:
    dataset = Dataset.from_list(ROWS)
    assert dataset_from_python(dataset) is dataset
    assert dataset_from_python(ROWS).to_list() == ROWS
    assert dataset_from_python([{"a": 1}, {"b": "x"}]).to_list() == [{"a": 1, "b": None}, {"a": None, "b": "x"}]
    for value, message in [
        (IterableDatasetDict(train=dataset.to_iterable_dataset()), r"pass dataset\['train'\]"),
        (DatasetDict(train=dataset), r"pass dataset\['train'\]"),
        ([], "an empty list"),
        ([{}], "have no columns"),
        ("data.jsonl", "of type str"),
        ([1], "dataset, row 1: the row is 1"),
        ([{"tools": object()}], "cannot be stored"),
    ]:
        with pytest.raises(DataError, match=message):
            dataset_from_python(value)


def test_a_hub_dataset_is_loaded_by_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> Dataset:
        given.append((args, kwargs))
        return Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_split("owner/name", "en", "train[:90%]").to_list() == ROWS
    assert load_split("owner/name", None, "test").to_list() == ROWS
    assert given == [(("owner/name", "en"), {"split": "train[:90%]"}), (("owner/name", None), {"split": "test"})]
