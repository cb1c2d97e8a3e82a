"""Convert rows to text with a user-defined formatting function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, Features, IterableDataset, Value

from alignment.config.errors import DataError, show
from alignment.config.lookup import FAILURES, raised

Format = Callable[[Mapping[str, Any]], str]


def formatted(
    data: Dataset | IterableDataset, function: Format, where: str, column: str = "text"
) -> Dataset | IterableDataset:
    """Replace the columns of ``data`` by one, ``column``, with the text that ``function`` returns for each row.

    Raises:
        DataError: the function raised an error or did not return a string; for a stream, raised when it is read.
            ``where`` names the data.
    """

    def made(row: Mapping[str, Any], number: int) -> dict[str, str]:
        place = f"{where}, row {number + 1}: formatting_func"
        try:
            text = function(row)
        except FAILURES as error:
            raise DataError(f"{place} raised {raised(error)}; fix the function, or remove the row") from error
        if not isinstance(text, str):
            raise DataError(f"{place} returned {show(text)}; expected a string")
        return {column: text}

    if isinstance(data, IterableDataset):
        return data.map(made, with_indices=True).select_columns([column])
    # In memory, because no fingerprint covers everything that the function depends on.
    return data.map(
        made,
        with_indices=True,
        remove_columns=data.column_names,
        features=Features({column: Value("string")}),
        keep_in_memory=True,
        load_from_cache_file=False,
        new_fingerprint="formatted",
        desc="Formatting",
    )
