"""Values that JSON can represent: columns that the readers do not know, and what is stored with prompts.

Such columns never make a dataset invalid. Dates and times become ISO strings, and non-finite numbers, with which
pandas represents missing values, become null. A column that JSON does not support (bytes, images, decimals) is dropped
with one warning.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from datetime import date, time
from typing import Any

import pyarrow as pa
from datasets import Features

from alignment.config.errors import DataError, listing, one_line, show

logger = logging.getLogger(__name__)
_FOREIGN = (
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view),
    *(pa.types.is_decimal, pa.types.is_duration, pa.types.is_interval),
)


def json_text(name: str, value: object, where: str) -> str:
    """Encode the value in column ``name`` as JSON; ``where`` names its row in messages.

    Raises:
        DataError: the value cannot be represented in JSON.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_iso_text)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: {name} is {show(value)}, which cannot be stored: {one_line(error)}; use values that JSON "
            "supports (strings, finite numbers, lists, objects), or remove the column"
        ) from error


def json_object(values: Mapping[str, Any], where: str) -> str:
    """Encode values by column as one JSON object; see :func:`json_text`."""
    return "{" + ", ".join(f"{json.dumps(name)}: {json_text(name, v, where)}" for name, v in values.items()) + "}"


def _iso_text(value: object) -> str:
    if isinstance(value, (date, time)):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def finite(value: Any) -> Any:
    """Return the value with every non-finite number replaced with null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def foreign_columns(features: Features) -> list[str]:
    """Return the columns whose types JSON does not support. Images, audio and video are bytes with a path."""
    return [field.name for field in features.arrow_schema if _is_foreign(field.type)]


def storable(row: Mapping[str, Any], known: Collection[str], where: str, left_out: set[str]) -> dict[str, Any]:
    """Return the row with columns that are not ``known`` converted to JSON types, without the columns ``left_out``.

    Columns that cannot be represented in JSON are added to ``left_out``.
    """
    kept = {}
    for name, value in row.items():
        if name not in known and not isinstance(value, (str, int, type(None))):
            try:
                value = json.loads(json_text(name, finite(value), where))
            except DataError:
                left_out.add(name)
        if name not in left_out:
            kept[name] = value
    return kept


def tell_left_out(names: Iterable[str], where: str) -> None:
    """Log a warning for columns that are dropped, if any."""
    if names := sorted(names):
        logger.warning(
            "%s: dropped, because the values cannot be represented in JSON: column %s", where, listing(names)
        )


def _is_foreign(stored: pa.DataType) -> bool:
    if isinstance(stored, pa.BaseExtensionType):
        stored = stored.storage_type
    if pa.types.is_dictionary(stored):
        stored = stored.value_type
    inner = [stored.field(number).type for number in range(stored.num_fields)]
    return any(is_one(stored) for is_one in _FOREIGN) or any(map(_is_foreign, inner))
