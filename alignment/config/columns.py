"""The names of columns that rows may have, and what `column_map` may say about them."""

from __future__ import annotations

from typing import Any

from alignment.config.errors import OptionError
from alignment.config.refusals import nearest, shown

COLUMNS = (
    "prompt", "completion", "label", "chosen", "rejected", "margin", "tools", "chat_template_kwargs", "messages",
    "text",
)  # fmt: skip
MAPPED_COLUMNS = ("query", "system")  # taken only where `column_map` names them: many datasets have such columns
_ELSEWHERE = {
    "response": "completion",
    "output": "completion",
    "instruction": "prompt",
    "input": "query",
    "conversations": "messages",
    "conversation": "messages",
    "kto_tag": "label",
}


def check_column_map(key: str, value: dict[str, str] | None) -> None:
    """Check a ``column_map``; ``key`` names the option in messages.

    Raises:
        OptionError: a name that no method expects (the map may be the wrong way round), or a column taken twice.
    """
    names: dict[str, str] = {}
    for name, column in (value or {}).items():
        if name not in (*COLUMNS, *MAPPED_COLUMNS):
            raise OptionError(f"{shown(key, value)}: {name!r} is no column that is expected{_hint(name, column)}")
        if column in names:
            raise OptionError(f"{shown(key, value)}: {column!r} is given for {names[column]} and {name}; keep one")
        names[column] = name


def _hint(name: str, column: Any) -> str:
    known = (*COLUMNS, *MAPPED_COLUMNS)
    if column in known:
        return f"; write expected name: name in the data, as in {{{column}: {name}}}"
    if name in _ELSEWHERE:
        return f"; it is called {_ELSEWHERE[name]} here"
    return nearest(name, known) or f"; set names among {', '.join(known)}"
