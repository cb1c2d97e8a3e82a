"""The README's tables of options, from the option classes: ``python -m alignment.config.option_tables README.md``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignment.config.errors import OutputError
from alignment.config.help import default_text, grouped_fields
from alignment.config.refusals import refused_fields
from alignment.config.registry import METHODS

BEGIN = "<!-- options: written by `make docs` from alignment/config/ -->"
END = "<!-- end of options -->"


def option_tables() -> str:
    """One folded table for each group of options, and the names that are refused for now."""
    parts = [_table(title, fields) for title, fields in _groups()]
    later = ", ".join(f"`{name}`" for name in sorted(refused_fields()))
    return "\n\n".join([*parts, f"Refused by name for now, with the nearest thing that works: {later}."])


def _groups() -> Iterator[tuple[str, list[dataclasses.Field[Any]]]]:
    """Title and fields of each group once, the shared ones first; without fields that are refused."""
    seen: set[type] = set()
    for cls in METHODS.values():
        for group, fields in grouped_fields(cls):
            working = [field for field in fields if field.name not in refused_fields()]
            if group not in seen and working:
                seen.add(group)
                yield vars(group)["TITLE"], working


def _table(title: str, fields: list[dataclasses.Field[Any]]) -> str:
    rows = [f"| `{field.name}` | {default_text(field)} | {field.metadata['help']} |" for field in fields]
    head = ["| option | default | |", "|---|---|---|"]
    return "\n".join([f"<details><summary>{title}</summary>", "", *head, *rows, "", "</details>"])


def with_tables(text: str) -> str:
    """A text with the tables between its two marks renewed.

    Raises:
        OutputError: it has no such marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise OutputError(f"the file has no place for the tables; put these two lines into it: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{option_tables()}\n\n{END}{after}"


def main() -> None:
    """Renew the tables of the files that are named."""
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
