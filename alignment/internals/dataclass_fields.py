"""Python's dataclasses: fields that only the constructor knows."""

from __future__ import annotations

import dataclasses
from typing import Any


def hide_field(field: dataclasses.Field[Any]) -> None:
    """Treat a field of a complete dataclass, and of its subclasses, as an ``InitVar`` with a default.

    ``dataclasses.fields`` omits it, so that ``HfArgumentParser`` does not add an argument that another class of a
    script adds as well, but ``dataclasses.replace`` passes its value on. With the annotation ``InitVar``, type
    checkers would not know the attribute. The kind of a field is private. Seen with Python 3.10 to 3.13.
    """
    field._field_type = dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]
