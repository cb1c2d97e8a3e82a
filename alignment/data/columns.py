"""Which of a dataset's columns are used, and by which name: what ``column_map`` says, and what a method needs."""

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
from alignment.data.targets.tokenised import all_token_columns, check_tokenised, token_columns

PROMPT_COLUMNS = ("prompt", "tools", "chat_template_kwargs")
IMAGES = ("image", "images")
_PACKED = "seq_lengths"  # beside token ids: the lengths of the sequences of a pack
_TURNS = "conversations"  # what ShareGPT calls messages


def arranged(
    dataset: Dataset,
    column_map: Mapping[str, str] | None,
    kind: Kind,
    where: str,
    method: str = "training",
    rules: RowRules = USUAL,
) -> Dataset:
    """The columns that rows are made of, by their expected names, and no others unless reward functions get them.

    Columns of token ids, where they are all there, come before any text. A column that is mapped is known by its new
    name only, and takes the place of one that has this name already. Rows are made of ``query`` and ``system`` only if
    they are mapped. What reward functions would get and JSON cannot hold is left out with a warning.

    Raises:
        DataError: a column of the map, or one that ``kind`` needs, is missing; there are images; or rows are packs.
    """
    there = dataset.column_names
    if dataset.format["type"] == "custom":
        skipping = " (with skip_prepare_dataset too: trainer-ready rows are read once)"
        raise DataError(
            f"{where}: Dataset.with_transform() makes new rows each time, and rows are tokenised once"
            f"{skipping if kind == 'prompt_completion' else ''}; apply it by Dataset.map()"
        )
    _refuse_images(dataset, where)
    tokens = token_columns(kind, there)
    if rules.tokenised:
        check_tokenised(tokens, where, there)
    if kind == "prompt_completion" and tokens is not None and _PACKED in there:
        raise DataError(
            f"{where}: these rows are packs ({_PACKED!r}), whose sequences would see one another; give the rows that "
            "they were made of, and set packing: true"
        )
    if tokens is not None and not column_map:
        return dataset.with_format(None).select_columns(list(tokens.names))
    column_map = mapped_columns(column_map, kind, there, where, rules)
    for name, column in column_map.items():
        if column not in there:
            raise DataError(
                f"{where}: column_map takes {name} from {column!r}, which is missing; columns: {listing(there)}"
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
    """The columns of an :func:`arranged` dataset that rows are not made of: they are handed to reward functions."""
    if kind != "prompt_only":
        return []
    made_of = {*PROMPT_COLUMNS, *(name for name in MAPPED_COLUMNS if name in (column_map or {}))}
    return [name for name in dataset.column_names if name not in made_of]


def stream_columns(column_map: Mapping[str, str] | None, kind: Kind, rules: RowRules = USUAL) -> set[str] | None:
    """The columns of a stream that :func:`arranged` may take, by their own names; None for every one."""
    if kind == "prompt_only":
        return None
    further = {rules.text_field, _TURNS} if kind == "prompt_completion" else set()
    return {*_row_columns(kind), *(column_map or {}).values(), *all_token_columns(kind), *further}


def mapped_columns(
    column_map: Mapping[str, str] | None, kind: Kind, there: Collection[str], where: str, rules: RowRules
) -> dict[str, str]:
    """The map with what ``dataset_text_field`` and ShareGPT's name of a conversation add to it.

    Raises:
        DataError: there is no column of the text field, nor any other to make rows of.
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
            f"{where}: dataset_text_field={rules.text_field!r}: there is no such column; columns: {listing(there)}"
        )
    return found


def check_no_images(row: Mapping[str, Any], where: str) -> None:
    """Refuse a row with pictures; ``where`` names it in messages."""
    for name in IMAGES:
        if row.get(name) not in (None, []):
            raise _images(name, where)


def _images(name: str, where: str) -> DataError:
    return DataError(
        f"{where}: column {name!r} holds pictures, and models here read text only; remove the column to train on the "
        "text alone"
    )


def _refuse_images(dataset: Dataset, where: str) -> None:
    """Refuse pictures, which a model of texts would be trained without."""
    for name in IMAGES:
        if name in dataset.column_names and _holds_something(dataset.with_format("arrow")[:][name]):
            raise _images(name, where)


def _holds_something(column: pa.ChunkedArray) -> bool:
    """Whether any value is neither null nor an empty list."""
    kind = column.type.storage_type if isinstance(column.type, pa.BaseExtensionType) else column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return bool(pc.sum(pc.list_value_length(column)).as_py())
    return column.null_count < len(column)


def _row_columns(kind: Kind) -> tuple[str, ...]:
    """The columns that rows of a kind may be made of without a map."""
    if kind == "prompt_only":
        return PROMPT_COLUMNS
    return tuple(name for name in COLUMNS if name != "margin" or kind == "preference_margin")


def check_columns(
    names: Iterable[str], kind: Kind, where: str, there: Iterable[str] | None = None, method: str = "training"
) -> None:
    """Check that a dataset has the columns that ``kind`` needs.

    Args:
        names: its columns, by the names that are expected.
        kind: the rows to make.
        where: names the dataset in messages.
        there: its columns by their own names, for messages; the same where None.
        method: what needs the rows, for messages.

    Raises:
        DataError: a column is missing, or the columns are those of the other kind.
    """
    has = set(names).__contains__
    columns = listing(there if there is not None else names)
    renamed = "; if they have other names, set column_map"
    if kind == "prompt_completion":
        if has("messages") or has("text") or (has("prompt") and has("completion")):
            return
        needs = f"{method} needs prompt and completion, or messages, or text"
        raise DataError(f"{where}: {needs}; the columns are {columns}{renamed}")
    if kind == "prompt_only":
        if has("prompt"):
            return
        raise DataError(f"{where}: {method} needs the missing prompt; columns: {columns}{renamed}")
    answers = has("label") and (has("messages") or (has("prompt") and has("completion")))
    if (has("chosen") and has("rejected")) or (kind == "unpaired_preference" and answers):
        return
    if kind == "preference" and (has("completion") or has("label")):
        raise DataError(
            f"{where}: {method} needs chosen and rejected, but the columns are {columns}; "
            "rows with completion and label are for a method on unpaired rows"
        )
    if kind in ("preference", "preference_margin") or has("chosen") or has("rejected"):
        missing = [name for name in ("chosen", "rejected") if not has(name)]
        raise DataError(f"{where}: {method} needs the missing {listing(missing)}; columns: {columns}{renamed}")
    missing = [name for name in ("prompt", "completion", "label") if not has(name)]
    if missing:
        remedy = " (label is true for a desirable completion, false otherwise)" if "label" in missing else ""
        raise DataError(
            f"{where}: {method} needs the missing {listing(missing)}{remedy}, or chosen and rejected; "
            f"columns: {columns}{renamed}"
        )
