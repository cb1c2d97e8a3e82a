"""Convert rows to text with a user-defined formatting function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, Features, IterableDataset, Value

from alignment.config.errors import DataError, OptionError, show
from alignment.config.lookup import FAILURES, raised

Format = Callable[[Mapping[str, Any]], str]


def formatted(
    data: Dataset | IterableDataset, function: Format, where: str, column: str = "text"
) -> Dataset | IterableDataset:
    """Apply ``function`` to each row to get its text.

    Args:
        data: the rows, with any columns except token IDs.
        function: maps a row to its text.
        where: name of the data in messages.
        column: name of the text column.

    Raises:
        OptionError: the rows are already tokenized, or ``function`` is not callable.
        DataError: the function raised an error or did not return a string; for a stream, raised when it is read.
    """
    if not callable(function):
        raise OptionError(f"formatting_func={show(function)}: expected a function that maps a row to a string")
    if "input_ids" in (data.column_names or ()):
        raise OptionError(
            f"formatting_func: the rows of {where} are already tokenized; remove formatting_func, or pass text"
        )

    def made(row: Mapping[str, Any], number: int) -> dict[str, str]:
        return {column: _text(row, number, function, where)}

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


def _text(row: Mapping[str, Any], number: int, function: Format, where: str) -> str:
    try:
        text = function(row)
    except FAILURES as error:
        raise DataError(
            f"{where}, row {number + 1}: formatting_func raised {raised(error)}; fix the function, or remove the row"
        ) from error
    if not isinstance(text, str):
        raise DataError(f"{where}, row {number + 1}: formatting_func returned {show(text)}; expected a string")
    return text
