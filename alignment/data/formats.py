"""From a row in any accepted format to a canonical, checked one.

Text is a string (standard rows) or a list of messages (conversational rows), the same kind throughout a row. KTO takes
``prompt, completion, label`` or pairs, which become two rows; CPO takes pairs. Every fault is a
:class:`~alignment.config.errors.DataError` that names row, key, value and remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from alignment.config.errors import DataError
from alignment.data.prompts import Message, split_messages, split_texts, without_prompt
from alignment.data.wording import listing, show, type_name

Kind = Literal["unpaired", "paired"]
Text = str | list[Message]

COLUMNS = ("prompt", "completion", "label", "chosen", "rejected", "tools", "chat_template_kwargs")
_METHODS = {"unpaired": "KTO", "paired": "CPO"}


@dataclass(frozen=True)
class Unpaired:
    """One answer and whether it is desirable. ``template`` goes to the chat template (``tools`` and so on)."""

    prompt: Text
    completion: Text
    label: bool
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, the better one first."""

    prompt: Text
    chosen: Text
    rejected: Text
    template: Mapping[str, Any] = field(default_factory=dict)


def check_columns(column_names: Iterable[str], kind: Kind, where: str) -> None:
    """Check that a dataset has the columns that ``kind`` needs; ``where`` names it in the message.

    Raises:
        DataError: a column is missing, or the columns are those of the other kind.
    """
    names = list(column_names)
    has = set(names).__contains__
    if has("chosen") and has("rejected"):
        return
    single = has("completion") or has("label")
    if kind == "paired" and single:
        raise DataError(
            f"{where}: CPO needs chosen and rejected, but the columns are {listing(names)}; "
            "use method kto for rows with completion and label"
        )
    if kind == "paired" or has("chosen") or has("rejected"):
        missing = [name for name in ("chosen", "rejected") if not has(name)]
        raise DataError(f"{where}: {_METHODS[kind]} needs the missing {listing(missing)}; columns: {listing(names)}")
    missing = [name for name in ("prompt", "completion", "label") if not has(name)]
    if missing:
        remedy = " (label is true for a desirable completion, false otherwise)" if "label" in missing else ""
        raise DataError(
            f"{where}: KTO needs the missing {listing(missing)}{remedy}, or chosen and rejected; "
            f"columns: {listing(names)}"
        )


def unpaired_rows(row: Mapping[str, Any], where: str) -> list[Unpaired]:
    """The canonical KTO rows of one row: one for ``prompt, completion, label``; a pair gives two, True then False.

    Args:
        row: one row of the dataset.
        where: names the row in messages, such as ``data.jsonl row 12``.

    Raises:
        DataError: the row is faulty.
        DropRow: a pair that cannot be split into prompt and completions.
    """
    if "completion" not in row or "label" not in row:
        pair = pair_row(row, where)
        return [
            Unpaired(pair.prompt, pair.chosen, True, pair.template),
            Unpaired(pair.prompt, pair.rejected, False, pair.template),
        ]
    label = row["label"]
    if type(label) is not bool:
        raise DataError(f"{where}: label is {show(label)}; set it to true or false")
    if row.get("prompt") is None:
        raise DataError(f'{where}: prompt is missing; KTO rows need one (an empty one is "" or [])')
    prompt, completion = _text(row, "prompt", where), _text(row, "completion", where)
    _check_same_kind(where, prompt=prompt, completion=completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        completion = without_prompt(prompt, completion)
    return [Unpaired(prompt, completion, label, _template(row, where))]


def pair_row(row: Mapping[str, Any], where: str) -> Pair:
    """The canonical pair of one row with ``chosen``, ``rejected`` and, optionally, ``prompt``.

    Without a prompt it is the common head of both answers. Conversations that repeat the prompt's messages lose them.

    Raises:
        DataError: the row is faulty.
        DropRow: there is no prompt, and the answers are identical.
    """
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            raise DataError(f"{where}: {key} is missing; every row needs chosen and rejected")
    chosen, rejected = _text(row, "chosen", where), _text(row, "rejected", where)
    _check_same_kind(where, chosen=chosen, rejected=rejected)
    template = _template(row, where)
    if row.get("prompt") is None:
        if isinstance(chosen, str) and isinstance(rejected, str):
            return Pair(*split_texts(chosen, rejected), template)
        assert isinstance(chosen, list) and isinstance(rejected, list)
        return Pair(*split_messages(chosen, rejected), template)
    prompt = _text(row, "prompt", where)
    _check_same_kind(where, prompt=prompt, chosen=chosen)
    if isinstance(prompt, list) and isinstance(chosen, list) and isinstance(rejected, list):
        chosen, rejected = without_prompt(prompt, chosen), without_prompt(prompt, rejected)
    return Pair(prompt, chosen, rejected, template)


def _text(row: Mapping[str, Any], key: str, where: str) -> Text:
    value = row[key]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise DataError(f"{where}: {key} is {show(value)}; give a string or a list of {{role, content}} messages")
    if not value and key != "prompt":
        raise DataError(f"{where}: {key} is an empty list; give at least one message")
    return [_message(message, f"{where}: {key}[{number}]") for number, message in enumerate(value)]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {show(message)}; give messages as {{role, content}}")
    for key in ("role", "content"):
        if key not in message:
            raise DataError(f"{where} has no {key} (it has: {listing(message)}); give messages as {{role, content}}")
        if not isinstance(message[key], str):
            raise DataError(f"{where}.{key} is {show(message[key])}; set it to a string")
    # Arrow fills keys that only other messages have with nulls; templates would take them for values.
    return {key: value for key, value in message.items() if value is not None}


def _check_same_kind(where: str, **texts: Text) -> None:
    (first, one), (second, other) = texts.items()
    if isinstance(one, str) is not isinstance(other, str):
        remedy = "give both as strings or both as messages"
        if first == "prompt" and isinstance(one, str):
            remedy += ", or remove the prompt column where the answers contain the prompt's messages"
        raise DataError(f"{where}: {first} is {type_name(one)} but {second} is {type_name(other)}; {remedy}")


def _template(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the row hands to the chat template besides its messages."""
    extra = row.get("chat_template_kwargs")
    if extra is not None and not isinstance(extra, Mapping):
        raise DataError(f"{where}: chat_template_kwargs is {show(extra)}; give an object of template variables")
    template = {key: value for key, value in (extra or {}).items() if value is not None}
    if row.get("tools") is not None:
        if not isinstance(row["tools"], list):
            raise DataError(f"{where}: tools is {show(row['tools'])}; give a list of tool descriptions")
        template["tools"] = row["tools"]
    return template
