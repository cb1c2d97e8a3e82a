"""Readers for JSON, JSON Lines and CSV files that do not guess types.

The generic loaders convert strings that look like dates to timestamps, and ``"true"`` to ``true`` in a column that
also has booleans. These readers keep every value as it is in the file and report errors with file and line. Columns of
a single primitive type are stored with this type, all others as JSON: there, dates and times become ISO strings, and
non-finite numbers, with which pandas represents missing values, become null.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any, NoReturn

from datasets import Features, Json, Value

from alignment.config.errors import DataError, listing, one_line, show
from alignment.config.options_data import COLUMNS

LABELS = {"true": True, "false": False}
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
_PLAIN = {str: "string", bool: "bool", int: "int64", float: "float64"}
_MARK = b"\xef\xbb\xbf"  # a byte order mark

Placed = Iterator[tuple[str, dict[str, Any]]]  # ("FILE, line 3", row)


def read_rows(path: Path) -> Placed:
    """Yield ``(place, row)`` for every row of a .json, .jsonl or .csv file; ``place`` names the file and line or row.

    A JSON file has one object per line, a single list of objects, or ``{"data": […]}``; DataError for anything else.
    """
    if path.suffix.lower() == ".csv":
        yield from _csv_rows(path)
        return
    text, line = b"", 1
    try:
        with path.open("rb") as file:
            texts = (text for each in file if (text := each.removeprefix(_MARK).strip()))
            first, another = next(texts, b""), next(texts, None) is not None
            file.seek(0)
            whole = first[:1] == b"[" or (path.suffix.lower() == ".json" and not (another and first.endswith(b"}")))
            for line, text in enumerate([file.read()] if whole else file, start=1):
                if not (text := text.removeprefix(_MARK).rstrip()):
                    continue
                found = json.loads(text.decode(), parse_constant=_refused, object_pairs_hook=_distinct)
                if b"\\ud" in text.lower():  # a string that cannot be encoded, such as an unpaired \ud83d
                    json.dumps(found, ensure_ascii=False).encode("utf-8")
                if whole and isinstance(found, dict) and "data" in found and not {*COLUMNS} & {*found}:
                    found = found["data"]
                for number, row in enumerate(found if isinstance(found, list) and whole else [found], start=1):
                    place = f"{path}, row {number}" if whole else f"{path}, line {line}"
                    if not isinstance(row, dict):
                        raise DataError(
                            f"{place}: the row is {show(row)}; expected an object with one entry per column"
                        )
                    yield place, row
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {line + error.lineno - 1}: invalid JSON: {error.msg} (column {error.colno}); "
            "expected one object per line, or a single list of objects"
        ) from error
    except UnicodeDecodeError as error:
        line += text.count(b"\n", 0, error.start)
        raise DataError(f"{path}, line {line}: not UTF-8 text: {error.reason}; save the file as UTF-8") from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"{path}, line {line}: a string contains an unpaired surrogate (\\ud… escape); fix or remove it"
        ) from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path}, line {line}: invalid JSON: {one_line(error)}") from error


def infer_features(rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Features:
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


def encoded(paths: Iterable[str], features: Features) -> Iterator[dict[str, Any]]:
    """Yield the rows of files for ``Dataset.from_generator``: one entry per feature, JSON columns as strings."""
    as_json = [name for name, feature in features.items() if isinstance(feature, Json)]
    for path in paths:
        for place, row in read_rows(Path(path)):
            texts = {name: json_text(name, row[name], place) for name in as_json if row.get(name) is not None}
            yield {name: row.get(name) for name in features} | texts


def json_text(name: str, value: object, where: str) -> str:
    """Encode the value in column ``name`` of the row ``where`` as JSON; DataError if that is not possible."""
    try:
        return json.dumps(_finite(value), allow_nan=False, default=_iso_text)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: {name} is {show(value)}, which cannot be stored: {one_line(error)}; use values that JSON "
            "supports (strings, numbers, lists, objects), or remove the column"
        ) from error


def json_object(values: Mapping[str, object], where: str) -> str:
    """Encode values by column as a JSON object; see :func:`json_text`."""
    return f"{{{', '.join(f'{json.dumps(name)}: {json_text(name, value, where)}' for name, value in values.items())}}}"


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


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"an object with the keys {listing(name for name, _ in pairs)} has one of them twice")
    return found


def _refused(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; use null or a number")


def _csv_rows(path: Path) -> Placed:
    """Yield the rows of a CSV file. All cells are strings, except for a ``label`` that is true or false."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 128 KiB is too small for long conversations
    header: list[str] = []
    with path.open("rb") as binary:
        start = binary.readline().decode("utf-8", "replace")
    mark = next((sign for sign in _DELIMITERS if sign in start), ",")
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader, line = csv.reader(file, delimiter=mark, strict=True), 1  # the line on which the next row starts
        try:
            for cells in reader:
                place, line = f"{path}, line {line}", reader.line_num + 1
                if header and cells:
                    if len(cells) != len(header):
                        raise DataError(
                            f"{place}: the row has {len(cells)} cells, but the header has {len(header)}; quote cells "
                            f"with {_DELIMITERS[mark]}"
                        )
                    row: dict[str, Any] = dict(zip(header, cells))
                    if "label" in row:
                        row["label"] = LABELS.get(row["label"].strip().lower(), row["label"])
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
