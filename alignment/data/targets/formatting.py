"""Rows made by a user's function, from whatever columns the data has to one text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset, Features, IterableDataset, Value

from alignment.config.errors import DataError, OptionError, show
from alignment.config.lookup import FAILURES, raised
from alignment.data.targets.tokenised import token_columns

Format = Callable[[Mapping[str, Any]], str]


def formatted(
    data: Dataset | IterableDataset, function: Format, where: str, column: str = "text"
) -> Dataset | IterableDataset:
    """The same rows, each as the text that ``function`` makes of it.

    Args:
        data: of any columns but token ids.
        function: takes a row.
        where: names the data in messages.
        column: the name of the text.

    Raises:
        OptionError: the rows are tokenised already, or the function is none.
        DataError: the function raised, or returned anything but a text; of a stream, when it is read.
    """
    if not callable(function):
        raise OptionError(f"formatting_func={show(function)}: pass a function from a row to its text")
    if token_columns("prompt_completion", data.column_names or ()):
        raise OptionError(f"formatting_func: the rows of {where} are tokenised already; leave one of the two out")

    def made(row: Mapping[str, Any], number: int) -> dict[str, str]:
        return {column: _text(row, number, function, where)}

    if isinstance(data, IterableDataset):
        return data.map(made, with_indices=True).select_columns([column])
    # In memory: a function has no name for a file on disk that would change with all that it depends on.
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
            f"{where} row {number + 1}: formatting_func raised {raised(error)}; correct it, or leave the row out"
        ) from error
    if not isinstance(text, str):
        raise DataError(
            f"{where} row {number + 1}: formatting_func returned {show(text)}; return one text for each row"
        )
    return text
