"""Which of a dataset's columns are used, and by which name: what ``column_map`` says, and what a method needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from datasets import Dataset

from alignment.config.columns import COLUMNS, MAPPED_COLUMNS
from alignment.config.errors import DataError
from alignment.data.formats import Kind
from alignment.data.wording import listing

__all__ = ["COLUMNS", "MAPPED_COLUMNS", "arranged", "check_columns"]

_METHODS = {"unpaired": "KTO", "paired": "CPO", "single": "SFT"}


def arranged(dataset: Dataset, column_map: Mapping[str, str] | None, kind: Kind, where: str) -> Dataset:
    """The columns that rows are made of, by their expected names, and no others.

    A column that is mapped is known by its new name only, and takes the place of one that has this name already.
    ``query`` and ``system`` are there only if they are mapped.

    Raises:
        DataError: a column of the map, or one that ``kind`` needs, is missing.
    """
    column_map, there = column_map or {}, dataset.column_names
    for name, column in column_map.items():
        if column not in there:
            raise DataError(
                f"{where}: column_map takes {name} from {column!r}, which is missing; columns: {listing(there)}"
            )
    own = [name for name in COLUMNS if name in there and name not in {*column_map, *column_map.values()}]
    check_columns([*own, *column_map], kind, where, there)
    dataset = dataset.with_format(None).select_columns([*own, *column_map.values()])
    new_names = {column: name for name, column in column_map.items() if column != name}
    return dataset.rename_columns(new_names) if new_names else dataset


def check_columns(names: Iterable[str], kind: Kind, where: str, there: Iterable[str] | None = None) -> None:
    """Check that a dataset has the columns that ``kind`` needs.

    Args:
        names: its columns, by the names that are expected.
        kind: the rows to make.
        where: names the dataset in messages.
        there: its columns by their own names, for messages; the same where None.

    Raises:
        DataError: a column is missing, or the columns are those of the other kind.
    """
    has = set(names).__contains__
    columns = listing(there if there is not None else names)
    renamed = "; if they have other names, set column_map"
    if kind == "single":
        if has("messages") or has("text") or (has("prompt") and has("completion")):
            return
        needs = "SFT needs prompt and completion, or messages, or text"
        raise DataError(f"{where}: {needs}; the columns are {columns}{renamed}")
    answers = has("label") and (has("messages") or (has("prompt") and has("completion")))
    if (has("chosen") and has("rejected")) or (kind == "unpaired" and answers):
        return
    if kind == "paired" and (has("completion") or has("label")):
        raise DataError(
            f"{where}: CPO needs chosen and rejected, but the columns are {columns}; "
            "use method kto for rows with completion and label"
        )
    if kind == "paired" or has("chosen") or has("rejected"):
        missing = [name for name in ("chosen", "rejected") if not has(name)]
        raise DataError(f"{where}: {_METHODS[kind]} needs the missing {listing(missing)}; columns: {columns}{renamed}")
    missing = [name for name in ("prompt", "completion", "label") if not has(name)]
    if missing:
        remedy = " (label is true for a desirable completion, false otherwise)" if "label" in missing else ""
        raise DataError(
            f"{where}: KTO needs the missing {listing(missing)}{remedy}, or chosen and rejected; "
            f"columns: {columns}{renamed}"
        )
