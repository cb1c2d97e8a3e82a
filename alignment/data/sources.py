"""Load a file, folder, Hub name, Python object or stream into a ``datasets.Dataset``.

JSON, JSON Lines and CSV files are read by ``readers``; Parquet and Arrow files, saved datasets and Hub datasets by the
``datasets`` library. The columns are interpreted by a kind of rows.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
from datasets import Dataset, Features, IterableDataset, Json

from alignment.config.errors import DataError, listing, one_line, show
from alignment.config.options_data import SUFFIXES, check_exists
from alignment.data.columns import check_no_images, foreign_columns
from alignment.data.readers import Placed, encoded, infer_features, json_object, json_text, read_rows
from alignment.internals.datasets import cache_folder, cause_of, data_files_by_split, slices, was_saved
from alignment.run.durable import write_json
from alignment.run.retries import is_offline

_EXACT = (".json", ".jsonl", ".csv")
_READER_VERSION = 1  # part of the cache key of files read by ``readers``


def load_split(name: str, config: str | None, split: str) -> Dataset:
    """Load one split of a dataset.

    Args:
        name: a local file, a local folder (written by ``save_to_disk``, or with data files), or a name on the Hub.
        config: configuration of a Hub dataset; None for local data.
        split: a split, or a slice of one such as ``train[:10%]``. A single file only has the split ``train``.

    Raises:
        DataError: the file, folder or split does not exist, cannot be read, or has no rows.
    """
    path = Path(name).expanduser()
    if not name:
        raise DataError("dataset_name is empty; set it to a file, a folder or a Hub name")
    local = path.is_dir() or path.is_file()
    if local and config is not None:
        raise DataError(f"dataset_config={config!r}: only for Hub datasets, but {name} is local; remove it")
    check_exists(name)
    if local:
        parts: dict[str, Any] = _folder_parts(path) if path.is_dir() else {"train": [path]}
        loaded: dict[str, Dataset] = {}
        for part in [piece.split("[")[0].strip() for piece in split.split("+")]:
            if part not in parts:
                raise DataError(f"{name}: split {part!r} does not exist; available: {listing(parts)}")
            kept = parts[part]
            loaded[part] = kept if isinstance(kept, Dataset) else _guarded(name, functools.partial(_read, name, kept))
        try:
            pieces = slices(split, {part: len(rows) for part, rows in loaded.items()})
        except (ValueError, AssertionError) as error:
            raise DataError(
                f"{name}: split {split!r} is not valid: {one_line(error)}; use, for example, train or train[:100]"
            ) from error
        dataset = datasets.concatenate_datasets([loaded[part].select(rows) for part, rows in pieces])
    else:
        label = f"dataset {name}" + (f" (config {config})" if config else "") + f", split {split}"
        dataset = _guarded(label, lambda: datasets.load_dataset(name, config, split=split), hub=True)
    if len(dataset) == 0:
        raise DataError(f"{name} (split {split}): contains no rows; choose a file or split with rows")
    return dataset


def dataset_from_python(value: object) -> Dataset:
    """Return a dataset passed by the user: a ``Dataset``, or a list of dictionaries, which keep their types."""
    if isinstance(value, Dataset):
        return value
    if isinstance(value, dict):  # also a DatasetDict, or one of streams
        key = "train" if "train" in value or not value else next(iter(value))
        raise DataError(f"dataset is a dictionary of splits ({listing(value)}); pass dataset[{key!r}]")
    if not isinstance(value, list):
        raise DataError(f"dataset is of type {type(value).__name__}; expected a datasets.Dataset or a list of dicts")
    if not value:
        raise DataError("dataset is an empty list; pass at least one row")
    rows = list(_checked_rows(value, None, "dataset"))
    features = infer_features(rows)
    if not features:
        raise DataError("the rows of the dataset have no columns; pass dicts with prompt, completion, label, …")
    columns = {name: [row.get(name) for _, row in rows] for name in features}
    for name in (name for name, feature in features.items() if isinstance(feature, Json)):
        given = zip(columns[name], rows)
        columns[name] = [None if value is None else json_text(name, value, place) for value, (place, _) in given]
    try:
        return Dataset.from_dict(columns, features=features)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"dataset is a list that cannot be stored: {one_line(error)}; use values that JSON supports"
        ) from error


def from_stream(
    stream: IterableDataset, rows: int | None, columns: Collection[str] | None, where: str, folder: Path
) -> Dataset:
    """Create a dataset of the first ``rows`` rows of a stream (None: all), without holding all of them in memory.

    Only ``columns`` are kept (None: all). A temporary file is written to ``folder``.

    Raises:
        DataError: the stream has no rows, fails, or has values in a used column that JSON does not support.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if columns is None and stream.features is not None:  # before reading, because images would be decoded
        stream = stream.remove_columns(foreign_columns(stream.features))
    given = _checked_rows(islice(stream.with_format(None), rows), columns, where)
    with TemporaryDirectory(prefix=".stream-", dir=folder) as scratch:
        path = Path(scratch) / "stream.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json_object(row, place) + "\n" for place, row in given)
        return _guarded(where, functools.partial(_read, where, [path]))


def _checked_rows(rows: Iterable[Any], columns: Collection[str] | None, where: str) -> Placed:
    """Yield rows, restricted to ``columns``, with the place of each."""
    number, left = 0, iter(rows)
    while True:
        try:
            row = next(left)
        except StopIteration:
            return
        except Exception as error:  # any error of the user's generator or the network
            raise DataError(f"{where}: the stream failed after row {number}: {one_line(error)}") from error
        number += 1
        place = f"{where}, row {number}"
        if not isinstance(row, dict) or not all(isinstance(key, str) for key in row):
            raise DataError(f"{place}: the row is {show(row)}; expected a dict of column names to values")
        check_no_images(row, place)
        yield place, {name: value for name, value in row.items() if columns is None or name in columns}


def _read(name: str, paths: list[Path]) -> Dataset:
    """Read files of one type.

    Those for ``readers`` are read once to infer types and find errors, and once to store them; never again with the
    same content.
    """
    suffix, *others = sorted({path.suffix.lower() for path in paths})
    if others:
        raise DataError(f"{name}: the split mixes {listing([suffix, *others])} files; use a single file type")
    if suffix not in SUFFIXES:
        raise DataError(
            f"{name}: {suffix or 'a file without suffix'} is not supported; use one of {listing(SUFFIXES)}"
        )
    files = [str(path) for path in paths]
    if suffix not in _EXACT:
        return datasets.load_dataset(suffix.removeprefix("."), data_files=files, split="train")
    digest = hashlib.blake2b(str(_READER_VERSION).encode(), digest_size=16)
    for path in paths:
        digest.update(path.suffix.lower().encode())
        digest.update(file_hash(path))
    key = digest.hexdigest()
    memory = cache_folder() / "deepspeed-alignment" / "columns" / f"{key}.json"
    if not memory.exists():
        found = infer_features(placed for path in paths for placed in read_rows(path))
        if not found:
            raise DataError(f"{name}: contains no rows with usable columns; choose data with rows")
        write_json(memory, found.to_dict())
    features = Features.from_dict(json.loads(memory.read_text(encoding="utf-8")))
    kwargs = {"paths": files, "features": features}
    return Dataset.from_generator(encoded, features=features, gen_kwargs=kwargs, fingerprint=key)


def file_hash(path: Path) -> bytes:
    """Return a 16-byte hash of a file's content."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()


def _folder_parts(folder: Path) -> dict[str, Any]:
    """Return split name → files or dataset, for a folder written by ``save_to_disk`` or with data files."""
    if was_saved(folder):
        saved = _guarded(str(folder), lambda: datasets.load_from_disk(str(folder)))
        return dict(saved) if isinstance(saved, dict) else {"train": saved}
    if not any(path.is_file() and path.suffix.lower() in SUFFIXES for path in folder.rglob("*")):
        raise DataError(f"{folder}: contains neither a saved dataset nor data files ({listing(SUFFIXES)})")
    parts = {}
    for split, names in data_files_by_split(str(folder)).items():
        if known := sorted(Path(file) for file in names if Path(file).suffix.lower() in SUFFIXES):
            parts[str(split)] = known
    return parts


def _guarded(name: str, load: Callable[[], Any], hub: bool = False) -> Any:
    """Run a loader, and convert any error to a DataError that names the data."""
    try:
        return load()
    except DataError:
        raise
    except Exception as error:  # the library raises many classes for corrupt files, and for the Hub
        cause = cause_of(error)
        if isinstance(cause, DataError):
            raise cause from error
        why = one_line(cause or error)
        if hub and is_offline(error):
            why = "there is no such file or folder, and the Hub cannot be reached"
        remedy = "; set dataset_name to a file, a folder or a Hub name" if hub else ""
        raise DataError(f"{name}: cannot be read: {why}{remedy}") from error
