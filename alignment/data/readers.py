"""Readers for JSON, JSON Lines and CSV files that do not guess types.

The generic loaders convert strings that look like dates to timestamps, and ``"true"`` to ``true`` in a column that
also has booleans. These readers keep every value as it is in the file and report errors with file and line. Columns of
a single primitive type are stored with this type, all others as JSON: there, dates and times become ISO strings, and
non-finite numbers, with which pandas represents missing values, become null.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import pickle
import sys
from collections.abc import Iterator, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any, NoReturn

from datasets import Features, Json, Value

from alignment.config.errors import DataError, one_line, show

LABELS = {"true": True, "false": False}
_PLAIN = {str: "string", bool: "bool", int: "int64", float: "float64"}
SPOOLED = ".rows"  # suffix of a temporary file
_MARK = b"\xef\xbb\xbf"  # a byte order mark

Placed = Iterator[tuple[str, dict[str, Any]]]  # ("FILE, line 3", row)


def read_rows(path: Path) -> Placed:
    """Yield ``(place, row)`` for every row of a .json, .jsonl or .csv file; ``place`` names the file and line or row.

    A JSON file has one object per line, or a single list of objects. A file of rows that were written by
    :func:`spooled` has places of its own.

    Raises:
        DataError: a line cannot be read, is not an object, or contains an unpaired surrogate.
    """
    with path.open("rb") as file:
        if path.suffix == SPOOLED:
            with contextlib.suppress(EOFError):
                while True:
                    yield pickle.load(file)
            return
        if path.suffix.lower() == ".csv":
            yield from _csv_rows(path)
            return
        first = next((text for line in file if (text := line.removeprefix(_MARK).strip())), b"")
        file.seek(0)
        if first.startswith(b"["):
            listed = enumerate(_parsed(file.read(), path, 1), start=1)
            rows = ((f"{path}, row {number}", row) for number, row in listed)
        else:
            lines = ((number, text) for number, line in enumerate(file, start=1) if (text := line.strip()))
            rows = ((f"{path}, line {number}", _parsed(text, path, number)) for number, text in lines)
        for place, row in rows:
            if not isinstance(row, dict):
                raise DataError(f"{place}: the row is {show(row)}; expected an object with one entry per column")
            yield place, row


def spooled(rows: Placed, path: Path) -> Placed:
    """Write rows to ``path`` as they arrive."""
    with path.open("wb") as file:
        for placed in rows:
            pickle.dump(placed, file)
            yield placed


def infer_features(rows: Placed) -> Features:
    """Infer a feature for each key: a primitive type if it holds the values of all rows, otherwise JSON."""
    seen: dict[str, set[type]] = {}
    for _, row in rows:
        for key, value in row.items():
            types = seen.setdefault(key, set())
            if value is not None:
                large = type(value) is int and not -(2**63) <= value < 2**63
                types.add(object if large or type(value) not in _PLAIN else type(value))
    features: dict[str, Any] = {}
    for key, types in seen.items():
        if types == {int, float}:  # NaN, with which pandas represents missing values, makes integers floats
            types = {float}
        (plain, *others) = [_PLAIN.get(one) for one in types or {str}]
        features[key] = Json() if others or plain is None else Value(plain)
    return Features(features)


def encoded(rows: Placed, features: Features) -> Iterator[dict[str, Any]]:
    """Encode rows for the dataset writer, without changing values: one entry per feature, JSON columns as strings.

    Raises:
        DataError: a value cannot be represented in JSON.
    """
    as_json = [key for key, feature in features.items() if isinstance(feature, Json)]
    for place, row in rows:
        out = {key: row.get(key) for key in features}
        yield out | {key: json_text(key, out[key], place) for key in as_json if out[key] is not None}


def encoded_files(paths: list[str], features: Features) -> Iterator[dict[str, Any]]:
    """Yield the encoded rows of several files, for ``Dataset.from_generator``."""
    for path in paths:
        yield from encoded(read_rows(Path(path)), features)


def json_text(name: str, value: object, where: str) -> str:
    """Encode the value in column ``name`` as JSON; ``where`` names its row in messages.

    Raises:
        DataError: the value cannot be represented in JSON.
    """
    try:
        return json.dumps(_finite(value), allow_nan=False, default=_iso_text)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: {name} is {show(value)}, which cannot be stored: {one_line(error)}; use values that JSON "
            "supports (strings, numbers, lists, objects), or remove the column"
        ) from error


def _iso_text(value: object) -> str:
    if isinstance(value, (date, time)):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def _finite(value: Any) -> Any:
    """Return the value with every non-finite number replaced with null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; use null or a number")


def _parsed(data: bytes, path: Path, line: int) -> Any:
    """Parse JSON that starts at a line of a file. Its strings can be encoded (an unpaired ``\\ud83d`` cannot)."""
    try:
        found = json.loads(data.decode("utf-8-sig"), parse_constant=_refused)
        if b"\\ud" in data.lower():
            json.dumps(found, ensure_ascii=False).encode("utf-8")
        return found
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {line + error.lineno - 1}: invalid JSON: {error.msg} (column {error.colno}); "
            "expected one object per line, or a single list of objects"
        ) from error
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        raise DataError(f"{path}, line {line}: not UTF-8 text: {error.reason}; save the file as UTF-8") from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}, line {line}: a string contains an unpaired surrogate (\\ud… escape); fix or remove it"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}, line {line}: invalid JSON: {one_line(error)}") from error


def _csv_rows(path: Path) -> Placed:
    """Yield the rows of a CSV file. All cells are strings, except that ``label`` must be true or false."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 128 KiB is too small for long conversations
    header: list[str] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader, line = csv.reader(file, strict=True), 1  # the line on which the next row starts
        try:
            for cells in reader:
                place, line = f"{path}, line {line}", reader.line_num + 1
                if header and cells:
                    if len(cells) != len(header):
                        raise DataError(
                            f"{place}: the row has {len(cells)} cells, but the header has {len(header)}; quote cells "
                            "with commas"
                        )
                    row: dict[str, Any] = dict(zip(header, cells))
                    if "label" in row:
                        if (word := row["label"].strip().lower()) not in LABELS:
                            raise DataError(f"{place}: label is {show(row['label'])}; expected true or false")
                        row["label"] = LABELS[word]
                    yield place, row
                elif twice := [name for name in cells if cells.count(name) > 1]:
                    raise DataError(f"{place}: the header contains column {twice[0]!r} twice; rename one")
                header = header or cells
        except csv.Error as error:
            raise DataError(f"{path}, line {line}: invalid CSV: {one_line(error)}") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: not UTF-8 text near line {line}: {error.reason}; save the file as UTF-8"
            ) from error
