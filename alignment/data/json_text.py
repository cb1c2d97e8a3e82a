"""A user's values as JSON text; what JSON cannot hold is named by row and column."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, time
from typing import Any

from alignment.config.errors import DataError
from alignment.data.wording import one_line, show


def json_text(name: str, value: object, where: str, dates: bool = True) -> str:
    """``value`` as JSON text.

    Args:
        name: the column that it is from.
        value: anything.
        where: names the row in messages.
        dates: write dates and times as ISO text.

    Raises:
        DataError: JSON cannot hold it.
    """
    try:
        return json.dumps(value, allow_nan=False, default=_iso_text if dates else None)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{where}: {name} is {show(value)}, which cannot be stored: {one_line(error)}; use JSON-like values "
            "(text, finite numbers, lists, objects), or remove the column"
        ) from error


def json_object(values: Mapping[str, Any], where: str, dates: bool = True) -> str:
    """Values by column as the text of one JSON object; see :func:`json_text`."""
    texts = (f"{json.dumps(name)}: {json_text(name, value, where, dates)}" for name, value in values.items())
    return "{" + ", ".join(texts) + "}"


def _iso_text(value: object) -> str:
    if isinstance(value, (date, time)):
        return value.isoformat()
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")
