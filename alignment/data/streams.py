"""Streamed data: the first rows of an ``IterableDataset``, written to disk once, so that they can be planned with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset, Features, IterableDataset

from alignment.config.errors import DataError
from alignment.data.columns import PROMPT_COLUMNS
from alignment.data.json_text import json_object
from alignment.data.readers import encode, infer_features
from alignment.data.sources import file_hash
from alignment.data.storable import foreign_columns, storable, tell_left_out
from alignment.data.wording import one_line


def from_stream(
    stream: IterableDataset, rows: int, columns: Iterable[str] | None, where: str, folder: Path
) -> Dataset:
    """A dataset of the first ``rows`` rows of a stream, which may have fewer; they are never all in memory.

    Args:
        stream: read once, from its start.
        rows: how many to take.
        columns: those to keep, as a stream may carry many more; None for the prompt's, and of all others those that
            JSON can hold, dates and times as ISO text.
        where: names the data in messages.
        folder: for a scratch file.

    Raises:
        DataError: the stream has no rows, breaks, or holds what JSON cannot in a column that rows are made of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".stream-", dir=folder) as scratch:
        path = Path(scratch) / "rows.jsonl"
        left_out: set[str] = set()
        if columns is None and stream.features is not None:  # without a look into them: images would be decoded
            left_out.update(foreign_columns(stream.features))
            stream = stream.remove_columns([*left_out])
        wanted = None if columns is None else set(columns)
        found = infer_features(_spooled(stream, rows, wanted, where, path, left_out))
        tell_left_out(left_out, where)
        features = Features({name: feature for name, feature in found.items() if name not in left_out})
        if not features:
            raise DataError(f"{where}: the stream gives no rows with columns that are used; give one that has some")
        given = {"path": str(path), "features": features}
        return Dataset.from_generator(_read, features=features, gen_kwargs=given, fingerprint=file_hash(path).hex())


def _spooled(
    stream: IterableDataset, rows: int, columns: set[str] | None, where: str, path: Path, left_out: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write the rows to ``path`` as they come, and yield each with its place for messages.

    Of every column, those that JSON cannot hold are added to ``left_out``.
    """
    number = 0
    with path.open("w", encoding="utf-8") as file:
        try:
            for number, row in enumerate(islice(stream.with_format(None), rows), start=1):
                place = f"{where} row {number}"
                if columns is None:
                    kept = storable(row, row.keys() - PROMPT_COLUMNS, place, left_out)
                else:
                    kept = {name: value for name, value in row.items() if name in columns}
                file.write(json_object(kept, place, dates=columns is None) + "\n")
                yield place, kept
        except DataError:
            raise
        except Exception as error:  # whatever the user's generator or the network raises
            raise DataError(f"{where}: the stream broke after row {number}: {one_line(error)}") from error


def _read(path: str, features: Features) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            yield encode(json.loads(line), features)
