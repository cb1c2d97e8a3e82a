"""Select and rename the columns of a dataset, according to ``column_map`` and to what a method needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from alignment.config.errors import DataError, listing
from alignment.config.options_data import COLUMNS, MAPPED_COLUMNS
from alignment.data.formats import Kind
from alignment.data.json_columns import foreign_columns, tell_left_out
from alignment.data.targets.rules import USUAL, RowRules
from alignment.data.targets.tokenized import all_token_columns, check_tokenized, check_whole, token_columns

PROMPT_COLUMNS = ("prompt", "tools", "chat_template_kwargs")
IMAGES = ("image", "images")
_PACKED = "seq_lengths"  # in datasets of token IDs: the lengths of the sequences of a pack
_TURNS = "conversations"  # ShareGPT's name of the messages column


def arranged(
    dataset: Dataset,
    column_map: Mapping[str, str] | None,
    kind: Kind,
    where: str,
    method: str = "training",
    rules: RowRules = USUAL,
) -> Dataset:
    """Return the dataset with the columns that are used, by their expected names, and those for reward functions.

    A complete set of token ID columns takes precedence over text. A mapped column is only available under its new
    name, and replaces a column that already has this name. ``query`` and ``system`` are only used if they are mapped.
    Columns for reward functions that cannot be represented in JSON are dropped with a warning.

    Raises:
        DataError: a column of the map, or one that ``kind`` needs, is missing; there are images; or rows are packs.
    """
    there = dataset.column_names
    if dataset.format["type"] == "custom":
        skipping = " (also with skip_prepare_dataset, where rows are read only once)"
        raise DataError(
            f"{where}: Dataset.with_transform() is not supported, because rows are tokenized only once"
            f"{skipping if kind == 'prompt_completion' else ''}; use Dataset.map() instead"
        )
    _refuse_images(dataset, where)
    tokens = token_columns(kind, there)
    if rules.tokenized:
        check_tokenized(tokens, where, there)
    if kind == "preference_margin" and tokens is not None:
        check_whole(tokens, where, there)
    if kind == "prompt_completion" and tokens is not None and _PACKED in there:
        raise DataError(
            f"{where}: the rows are already packed ({_PACKED!r}), so their sequences would attend to one another; "
            "pass the original rows and set packing: true"
        )
    if tokens is not None and not column_map:
        return dataset.with_format(None).select_columns(list(tokens.names))
    column_map = mapped_columns(column_map, kind, there, where, rules)
    for name, column in column_map.items():
        if column not in there:
            raise DataError(
                f"{where}: column_map maps {name} to column {column!r}, which does not exist; columns: "
                f"{listing(there)}"
            )
    mapped = {*column_map, *column_map.values()}
    own = [name for name in _row_columns(kind) if name in there and name not in mapped]
    check_columns([*own, *column_map], kind, where, there, method)
    extra = [name for name in there if name not in {*own, *mapped}] if kind == "prompt_only" else []
    foreign = [name for name in foreign_columns(dataset.features) if name in extra]
    tell_left_out(foreign, where)
    extra = [name for name in extra if name not in foreign]
    dataset = dataset.with_format(None).select_columns([*own, *column_map.values(), *extra])
    new_names = {column: name for name, column in column_map.items() if column != name}
    return dataset.rename_columns(new_names) if new_names else dataset


def extra_columns(dataset: Dataset, column_map: Mapping[str, str] | None, kind: Kind) -> list[str]:
    """Return the columns of an :func:`arranged` dataset that are passed to reward functions only."""
    if kind != "prompt_only":
        return []
    made_of = {*PROMPT_COLUMNS, *(name for name in MAPPED_COLUMNS if name in (column_map or {}))}
    return [name for name in dataset.column_names if name not in made_of]


def stream_columns(column_map: Mapping[str, str] | None, kind: Kind, rules: RowRules = USUAL) -> set[str] | None:
    """Return the columns of a stream that :func:`arranged` may use, by their original names; None for all."""
    if kind == "prompt_only":
        return None
    further = {rules.text_field, _TURNS} if kind == "prompt_completion" else set()
    return {*_row_columns(kind), *(column_map or {}).values(), *all_token_columns(kind), *further}


def mapped_columns(
    column_map: Mapping[str, str] | None, kind: Kind, there: Collection[str], where: str, rules: RowRules
) -> dict[str, str]:
    """Return the map extended by ``dataset_text_field`` and by ShareGPT's name of the messages column.

    Raises:
        DataError: neither the text field nor any other usable column exists.
    """
    found = dict(column_map or {})
    if not found and token_columns(kind, there) is not None:
        return found
    if kind != "prompt_completion" or {"text", "messages", "completion"} & found.keys():
        return found
    if rules.text_field in there:
        return found if rules.text_field == "text" else {**found, "text": rules.text_field}
    if _TURNS in there and "messages" not in there and "completion" not in there:
        return {**found, "messages": _TURNS}
    if rules.text_field != "text" and not {"messages", "completion"} & {*there}:
        raise DataError(
            f"{where}: dataset_text_field={rules.text_field!r}: this column does not exist; columns: {listing(there)}"
        )
    return found


def check_no_images(row: Mapping[str, Any], where: str) -> None:
    """Reject a row with images; ``where`` names it in messages."""
    for name in IMAGES:
        if row.get(name) not in (None, []):
            raise _images(name, where)


def _images(name: str, where: str) -> DataError:
    return DataError(
        f"{where}: column {name!r} contains images, but only text models are supported; remove the column to train on "
        "the text only"
    )


def _refuse_images(dataset: Dataset, where: str) -> None:
    """Reject images, which would otherwise be ignored silently."""
    for name in IMAGES:
        if name in dataset.column_names and _holds_something(dataset.with_format("arrow")[:][name]):
            raise _images(name, where)


def _holds_something(column: pa.ChunkedArray) -> bool:
    """Return whether any value is neither null nor an empty list."""
    kind = column.type.storage_type if isinstance(column.type, pa.BaseExtensionType) else column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return bool(pc.sum(pc.list_value_length(column)).as_py())
    return column.null_count < len(column)


def _row_columns(kind: Kind) -> tuple[str, ...]:
    """Return the columns that rows of a kind may use without a map."""
    if kind == "prompt_only":
        return PROMPT_COLUMNS
    return tuple(name for name in COLUMNS if name != "margin" or kind == "preference_margin")


def check_columns(
    names: Iterable[str], kind: Kind, where: str, there: Iterable[str] | None = None, method: str = "training"
) -> None:
    """Check that a dataset has the columns that ``kind`` needs.

    Args:
        names: its columns, by their expected names.
        kind: the kind of rows.
        where: name of the dataset in messages.
        there: its columns by their original names, for messages; None if they are the same.
        method: name of the method in messages.

    Raises:
        DataError: a column is missing, or the columns are those of another kind of rows.
    """
    has = set(names).__contains__
    columns = listing(there if there is not None else names)
    renamed = "; if your columns have other names, set column_map"
    if kind == "prompt_completion":
        if has("messages") or has("text") or (has("prompt") and has("completion")):
            return
        needs = f"{method} requires prompt and completion, or messages, or text"
        raise DataError(f"{where}: {needs}; columns: {columns}{renamed}")
    if kind == "prompt_only":
        if has("prompt"):
            return
        raise DataError(f"{where}: missing column prompt, which {method} requires; columns: {columns}{renamed}")
    answers = has("label") and (has("messages") or (has("prompt") and has("completion")))
    if (has("chosen") and has("rejected")) or (kind == "unpaired_preference" and answers):
        return
    if kind == "preference" and (has("completion") or has("label")):
        raise DataError(
            f"{where}: {method} requires chosen and rejected, but the columns are {columns}; "
            "for rows with completion and label, use a method for unpaired data such as kto"
        )
    if kind in ("preference", "preference_margin") or has("chosen") or has("rejected"):
        missing = [name for name in ("chosen", "rejected") if not has(name)]
        plural = "columns" if missing[1:] else "column"
        raise DataError(
            f"{where}: missing {plural} {listing(missing)}; {method} requires chosen and rejected; "
            f"columns: {columns}{renamed}"
        )
    missing = [name for name in ("prompt", "completion", "label") if not has(name)]
    if missing:
        remedy = " (label is true for a desirable completion, false otherwise)" if "label" in missing else ""
        plural = "columns" if missing[1:] else "column"
        raise DataError(
            f"{where}: missing {plural} {listing(missing)}{remedy}; {method} requires prompt, completion and label, "
            f"or chosen and rejected; columns: {columns}{renamed}"
        )
