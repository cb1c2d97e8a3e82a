"""The tables in docs/reference/options.md: every option of every method, from the options classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignment.cli.help import default_text, grouped_fields, title_of
from alignment.config.registry import METHODS

OPTIONS = Path(__file__).resolve().parent.parent.parent / "docs" / "reference" / "options.md"
BEGIN = "<!-- options: written by `make tables` from alignment/config/ -->"
END = "<!-- end of options -->"


def options_page() -> str:
    """Return the text of the page with the tables between its two markers regenerated."""
    before, _, rest = OPTIONS.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{OPTIONS} has no markers for the tables; add these two lines: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{option_tables()}\n\n{END}{after}"


def option_tables() -> str:
    """Return a table for each group of options, and that of losses."""
    return "\n\n".join([*(_table(title, fields) for title, fields in _groups()), losses_table()])


def losses_table() -> str:
    """Return the table of all losses: the options that each reads besides ``beta``, and its paper if it has one."""
    lines = [
        "## Losses",
        "",
        "| method | `loss_type` | options besides `beta` | paper besides the method's |",
        "|---|---|---|---|",
    ]
    for method, cls in METHODS.items():
        for name, loss in getattr(cls, "LOSSES", {}).items():
            read = "; ".join(f"`{option}`, {allowed.phrase}" for option, allowed in loss.reads.items())
            cited = "" if loss.paper is None else "[{}]({})".format(*loss.paper)
            lines.append(f"| {method} | `{name}` | {read} | {cited} |")
    return "\n".join(lines)


def _groups() -> Iterator[tuple[str, list[dataclasses.Field[Any]]]]:
    """Yield the title and the fields of each group once, shared groups first."""
    seen: set[type] = set()
    for cls in METHODS.values():
        for group, fields in grouped_fields(cls):
            if group not in seen:
                seen.add(group)
                yield title_of(group), fields


def _table(title: str, fields: list[dataclasses.Field[Any]]) -> str:
    rows = [f"| `{field.name}` | {default_text(field)} | {field.metadata['help']} |" for field in fields]
    head = ["| option | default | description |", "|---|---|---|"]
    return "\n".join([f"## {title}", "", *head, *rows])
