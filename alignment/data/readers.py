"""Readers for JSON, JSON Lines and CSV files that do not guess types.

The generic loaders convert strings that look like dates to timestamps, and ``"true"`` to ``true`` in a column that
also has booleans. These readers keep every value as it is in the file and report errors with file and line. Columns of
a single primitive type are stored with this type, all others as JSON.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from datasets import Features, Json, Value

from alignment.config.errors import DataError, one_line, show, type_name

TEXT_COLUMNS = ("prompt", "completion", "chosen", "rejected")
LABEL_COLUMN = "label"
_PLAIN = {"text": "string", "bool": "bool", "int": "int64", "float": "float64"}
_LABELS = {"true": True, "false": False}

Placed = Iterator[tuple[str, dict[str, Any]]]  # ("FILE line 3", row)


def read_rows(path: Path) -> Placed:
    """Yield ``(place, row)`` for every row of a .json, .jsonl or .csv file; ``place`` names the file and line or row.

    Raises:
        DataError: a line cannot be read, is not an object, or contains an unpaired surrogate.
    """
    try:
        if path.suffix.lower() == ".csv":
            yield from _csv_rows(path)
        elif _is_json_list(path):
            yield from _json_list_rows(path)
        else:
            yield from _json_line_rows(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def infer_features(rows: Iterable[tuple[str, dict[str, Any]]]) -> Features:
    """Infer a feature for each key: its primitive type if all rows have the same, otherwise JSON. Nulls are ignored.

    Raises:
        DataError: a known column mixes a valid type with an invalid one, such as booleans and strings in label.
    """
    seen: dict[str, dict[str, tuple[str, Any]]] = {}  # key → kind → first place and value
    for place, row in rows:
        for key, value in row.items():
            kind = _kind(value)
            if kind == "json" and key in TEXT_COLUMNS:
                _check_contents(place, key, value)
            kinds = seen.setdefault(key, {})
            if kind not in kinds:
                kinds[kind] = (place, value)
    for key, kinds in seen.items():
        _check_mixture(key, kinds)
    return Features({key: _feature(set(kinds) - {"null"}) for key, kinds in seen.items()})


def encode(row: dict[str, Any], features: Features) -> dict[str, Any]:
    """Encode a row for the dataset writer, without changing values: one entry per feature, JSON columns as strings."""
    out: dict[str, Any] = {}
    for key, feature in features.items():
        value = row.get(key)
        out[key] = json.dumps(value, allow_nan=False) if isinstance(feature, Json) and value is not None else value
    return out


def encoded_rows(paths: list[str], features: Features) -> Iterator[dict[str, Any]]:
    """Yield the encoded rows of several files, for ``Dataset.from_generator``."""
    for path in paths:
        for _, row in read_rows(Path(path)):
            yield encode(row, features)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "json"
    return {bool: "bool", int: "int", float: "float", str: "text"}.get(type(value), "json")


def _feature(kinds: set[str]) -> Any:
    if not kinds:
        return Value("string")
    return Value(_PLAIN[next(iter(kinds))]) if len(kinds) == 1 and kinds <= _PLAIN.keys() else Json()


def _check_mixture(key: str, kinds: dict[str, tuple[str, Any]]) -> None:
    """Report the first value of an invalid type in a column that also has values of a valid type."""
    if key == LABEL_COLUMN:
        right, wanted = {"bool"}, "true or false"
    elif key in TEXT_COLUMNS:
        right, wanted = {"text", "json"}, "a string or a list of messages"
    else:
        return
    wrong = [kind for kind in kinds if kind not in right | {"null"}]
    good = [kind for kind in kinds if kind in right]
    if wrong and good:
        place, value = kinds[wrong[0]]
        raise DataError(
            f"{place}: {key} is {show(value)}, but other rows have {type_name(kinds[good[0]][1])}; expected {wanted}"
        )


def _check_contents(place: str, key: str, value: object) -> None:
    """Report a message whose content is a number or a boolean, which no method supports."""
    for number, message in enumerate(value if isinstance(value, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, (bool, int, float)):
            raise DataError(f"{place}: {key}[{number}].content is {show(content)}; expected a string")


def _is_json_list(path: Path) -> bool:
    with path.open("rb") as file:
        for line in file:
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if text:
                return text.startswith(b"[")
    return False


def _json_list_rows(path: Path) -> Placed:
    data = path.read_bytes()
    try:
        rows = json.loads(data.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: invalid JSON: {error.msg}; fix the file") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text: {error.reason}; save the file as UTF-8") from error
    except ValueError as error:
        raise DataError(f"{path}: invalid JSON: {one_line(error)}") from error
    for number, row in enumerate(rows, start=1):
        yield _checked(f"{path}, row {number}", row, escapes=b"\\ud" in data.lower())


def _json_line_rows(path: Path) -> Placed:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}, line {number}"
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _checked(place, _json_line(place, line), escapes=b"\\ud" in line.lower())


def _json_line(place: str, line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8").rstrip(), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: invalid JSON: {error.msg} (column {error.colno}); "
            "expected one object per line, or a single list of objects"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 text: {error.reason}; save the file as UTF-8") from error
    except ValueError as error:
        raise DataError(f"{place}: invalid JSON: {one_line(error)}") from error


def _checked(place: str, row: object, escapes: bool) -> tuple[str, dict[str, Any]]:
    """Check that the row is an object whose strings can be encoded (an unpaired surrogate ``\\ud83d`` cannot)."""
    if not isinstance(row, dict):
        raise DataError(f"{place}: the row is {show(row)}; expected an object with one entry per column")
    if escapes:
        try:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place}: a string contains an unpaired surrogate (\\ud… escape); fix or remove it"
            ) from error
    return place, row


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value; use null or a number")


def _csv_rows(path: Path) -> Placed:
    """Yield the rows of a CSV file. All cells are strings, except that ``label`` must be true or false."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default of 128 KiB is too small for long conversations
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        header: list[str] | None = None
        while True:
            first = reader.line_num + 1
            place = f"{path}, line {first}"
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise DataError(f"{place}: invalid CSV: {one_line(error)}") from error
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}: not UTF-8 text near line {first}: {error.reason}; save the file as UTF-8"
                ) from error
            if cells is None:
                return
            if not cells:
                continue
            if header is None:
                header = _header(place, cells)
            elif len(cells) != len(header):
                raise DataError(
                    f"{place}: the row has {len(cells)} cells, but the header has {len(header)}; quote cells with "
                    "commas"
                )
            else:
                yield place, _csv_row(place, header, cells)


def _header(place: str, cells: list[str]) -> list[str]:
    twice = [name for name in cells if cells.count(name) > 1]
    if twice:
        raise DataError(f"{place}: the header contains column {twice[0]!r} twice; rename one")
    return cells


def _csv_row(place: str, header: list[str], cells: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = dict(zip(header, cells, strict=True))
    if LABEL_COLUMN in row:
        word = row[LABEL_COLUMN]
        if word.strip().lower() not in _LABELS:
            raise DataError(f"{place}: label is {show(word)}; expected true or false")
        row[LABEL_COLUMN] = _LABELS[word.strip().lower()]
    return row
