"""Select and rename the columns of a dataset, according to ``column_map`` and to the kind of its rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features

from alignment.config.errors import DataError, listing
from alignment.config.options_data import MAPPED_COLUMNS
from alignment.data.kinds.base import Kind

logger = logging.getLogger(__name__)
_IMAGES = ("image", "images")
_FOREIGN = (
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view),
    *(pa.types.is_decimal, pa.types.is_duration, pa.types.is_interval),
)


def used_columns(kind: Kind, column_map: Mapping[str, str] | None) -> set[str] | None:
    """Return the columns that :func:`arranged` may use, by their original names; None for all."""
    return None if kind.keeps_columns else {*kind.columns, *(column_map or {}).values(), *kind.tokens.names}


def arranged(
    dataset: Dataset, column_map: Mapping[str, str], kind: Kind, where: str, method: str = "training"
) -> tuple[Dataset, list[str]]:
    """Return the dataset with the columns that are used, by their expected names, and the names of the kept others.

    A complete set of token ID columns takes precedence over text. A mapped column is only available under its new
    name, and replaces a column that already has this name. ``query`` and ``system`` are only used if they are mapped.
    Other columns that are kept but cannot be represented in JSON are dropped with a warning.

    Raises:
        DataError: a column of the map, or one that ``kind`` needs, is missing; or the data cannot be used.
    """
    there = dataset.column_names
    if dataset.format["type"] == "custom":
        raise DataError(
            f"{where}: Dataset.with_transform() is not supported (also with skip_prepare_dataset), because rows are "
            "tokenized only once; use Dataset.map() instead"
        )
    for name in _IMAGES:  # they would otherwise be ignored silently
        if name in there and _holds_something(dataset.with_format("arrow")[:][name]):
            check_no_images({name: True}, where)
    kind.tokens.check(there, where)
    tokens = kind.tokens.find(there)
    if tokens is not None and not column_map:
        return dataset.with_format(None).select_columns(list(tokens.names)), []
    for name, column in column_map.items():
        if column not in there:
            said = f"column_map maps {name} to column {column!r}, which does not exist"
            raise DataError(f"{where}: {said}; columns: {listing(there)}")
    mapped = {*column_map, *column_map.values()}
    own = [name for name in kind.columns if name in there and name not in mapped]
    kind.check_columns([*own, *column_map], there, where, method)
    others = [name for name in there if kind.keeps_columns and name not in {*own, *mapped}]
    if foreign := sorted({*foreign_columns(dataset.features)} & {*others}):
        logger.warning("%s: dropped, because JSON cannot represent the values: column %s", where, listing(foreign))
    kept = [*own, *column_map.values(), *(name for name in others if name not in foreign)]
    dataset = dataset.with_format(None).select_columns(kept)
    if new_names := {column: name for name, column in column_map.items() if column != name}:
        dataset = dataset.rename_columns(new_names)
    read = {*kind.columns, *(name for name in MAPPED_COLUMNS if name in column_map)}
    return dataset, [name for name in dataset.column_names if name not in read]


def check_no_images(row: Mapping[str, Any], where: str) -> None:
    """Reject a row with images; ``where`` names it in messages."""
    for name in _IMAGES:
        if row.get(name) not in (None, []):
            raise DataError(
                f"{where}: column {name!r} contains images, but only text models are supported; remove the column to "
                "train on the text only"
            )


def _holds_something(column: pa.ChunkedArray) -> bool:
    """Return whether any value is neither null nor an empty list."""
    values = column.type.storage_type if isinstance(column.type, pa.BaseExtensionType) else column.type
    if pa.types.is_list(values) or pa.types.is_large_list(values):
        return bool(pc.sum(pc.list_value_length(column)).as_py())
    return column.null_count < len(column)


def foreign_columns(features: Features) -> list[str]:
    """Return the columns whose types JSON does not support. Images, audio and video are bytes with a path."""

    def is_foreign(stored: pa.DataType) -> bool:
        if isinstance(stored, pa.BaseExtensionType):
            stored = stored.storage_type
        if pa.types.is_dictionary(stored):
            stored = stored.value_type
        inner = [stored.field(number).type for number in range(stored.num_fields)]
        return any(is_one(stored) for is_one in _FOREIGN) or any(map(is_foreign, inner))

    return [field.name for field in features.arrow_schema if is_foreign(field.type)]
