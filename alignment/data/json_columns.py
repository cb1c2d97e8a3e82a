"""Values as JSON: columns without a single type, and what is stored with prompts for reward functions.

Dates and times become ISO strings, and non-finite numbers, with which pandas represents missing values, become null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, time
from typing import Any

import pyarrow as pa
from datasets import Features

from alignment.config.errors import DataError, one_line, show

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
        return json.dumps(_finite(value), allow_nan=False, default=_iso_text)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: {name} is {show(value)}, which cannot be stored: {one_line(error)}; use values that JSON "
            "supports (strings, numbers, lists, objects), or remove the column"
        ) from error


def _iso_text(value: object) -> str:
    if isinstance(value, (date, time)):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def _finite(value: Any) -> Any:
    """Return the value with every non-finite number replaced with null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, (list, tuple)) else value


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
