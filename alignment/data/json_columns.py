"""JSON columns that are stored with tokenized prompts, with the same types in every dataset of a mixture.

They contain the original prompt, its template variables and all unused columns, which are stored for reward functions
and never make a dataset invalid. Non-finite numbers, with which pandas represents missing values, become null. A
column that cannot be represented in JSON (bytes, images, decimals) is dropped with one warning.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, time
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, Json, Value

from alignment.config.errors import DataError, listing, one_line, show
from alignment.data.formats import PromptOnly, Text

logger = logging.getLogger(__name__)
_FOREIGN = (
    *(pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view),
    *(pa.types.is_decimal, pa.types.is_duration, pa.types.is_interval),
)
STORED = Features({name: Value("string") for name in ("prompt", "template", "columns")})


def json_text(name: str, value: object, where: str, dates: bool = True) -> str:
    """Encode ``value`` as JSON.

    Args:
        name: its column.
        value: any value.
        where: name of the row in messages.
        dates: encode dates and times as ISO strings.

    Raises:
        DataError: the value cannot be represented in JSON.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_iso_text if dates else None)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: {name} is {show(value)}, which cannot be stored: {one_line(error)}; use values that JSON "
            "supports (strings, finite numbers, lists, objects), or remove the column"
        ) from error


def json_object(values: Mapping[str, Any], where: str, dates: bool = True) -> str:
    """Encode values by column as one JSON object; see :func:`json_text`."""
    texts = (f"{json.dumps(name)}: {json_text(name, value, where, dates)}" for name, value in values.items())
    return "{" + ", ".join(texts) + "}"


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


def storable(row: Mapping[str, Any], names: Collection[str], where: str, left_out: set[str]) -> dict[str, Any]:
    """Return the row with the columns ``names`` converted to JSON types, without the columns in ``left_out``.

    Columns that cannot be represented in JSON are added to ``left_out``. Dates and times become ISO strings.
    """
    kept = {}
    for name, value in row.items():
        if name in names and name not in left_out:
            try:
                value = json.loads(json_text(name, finite(value), where))
            except DataError:
                left_out.add(name)
        if name not in left_out:
            kept[name] = value
    return kept


def storable_rows(
    rows: list[dict[str, Any]], features: Features, names: Collection[str], where: str
) -> tuple[list[dict[str, Any]], Features]:
    """Return :func:`storable` rows and their remaining features. Only JSON columns are checked."""
    kept, numbers = {}, (int, float, type(None))
    for name, feature in features.items():
        # Numbers of which some are not finite stay floats, as in pandas: a margin must not become null here.
        values = [row.get(name) for row in rows] if isinstance(feature, Json) and name in names else []
        broken = any(isinstance(value, float) and not math.isfinite(value) for value in values)
        kept[name] = Value("float64") if broken and all(type(value) in numbers for value in values) else feature
    names = {name for name, feature in kept.items() if isinstance(feature, Json) and name in names}
    left_out: set[str] = set()
    rows = [storable(row, names, f"{where}, row {number}", left_out) for number, row in enumerate(rows, start=1)]
    tell_left_out(left_out, where)
    return rows, Features({name: feature for name, feature in kept.items() if name not in left_out})


def tell_left_out(names: Iterable[str], where: str) -> None:
    """Log a warning for columns that are dropped, if any."""
    if names := sorted(names):
        logger.warning(
            "%s: dropped, because the values cannot be represented in JSON: column %s", where, listing(names)
        )


def _is_foreign(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(is_kind(kind) for is_kind in _FOREIGN) or any(map(_is_foreign, inner))


@dataclass(frozen=True)
class PromptRow:
    """A prompt with the data that reward functions and models need.

    Attributes:
        row: the source row, counted from 0.
        prompt: the canonical prompt, a string or messages.
        template: variables for the chat template, such as ``tools``.
        columns: the user's other columns by name, for reward functions.
    """

    row: int
    prompt: Text
    template: Mapping[str, Any]
    columns: Mapping[str, Any]


def prompt_row(dataset: Dataset, index: int) -> PromptRow:
    """Read row ``index`` of a tokenized dataset of prompts."""
    stored = dataset[index]
    prompt, template, columns = (json.loads(stored[name]) for name in STORED)
    return PromptRow(int(stored["row"]), prompt, template, columns)


def stored_prompt(prompted: PromptOnly, columns: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the columns :data:`STORED` of one row.

    Args:
        prompted: the canonical row.
        columns: the user's other columns, in which non-finite numbers become null.
        where: name of the row in messages.

    Raises:
        DataError: a value cannot be represented in JSON.
    """
    return {
        "prompt": json_text("prompt", prompted.prompt, where),
        "template": json_text("chat_template_kwargs", prompted.template, where),
        "columns": json_object(finite(columns), where),
    }
