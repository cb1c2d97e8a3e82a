"""Texts as people write them, made into what chat templates take: a string, or a list of ``{role, content}`` messages.

Understood besides: ShareGPT's ``{from, value}`` turns, one message that is not in a list, contents given as a list of
text parts, and the assistant's calls of tools, whose content may be null. Also here: the implicit prompt, the common
head of ``chosen`` and ``rejected``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from alignment.config.errors import DataError, listing, one_line, show, type_name

HH_TURN = "\n\nAssistant:"  # the turn mark of Anthropic's HH texts
IDENTICAL = "chosen and rejected are identical"
CUT_ALIKE = "chosen and rejected are identical once they are cut to length"

Message = dict[str, Any]
Text = str | list[Message]
# ShareGPT's names of speakers, and what they are for chat templates.
_SPEAKERS = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


class DropRow(Exception):
    """A row that cannot be used and is left out; ``reason`` is what the report counts it under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """``(prompt, chosen, rejected)`` for two texts that begin alike: both keep something, and no word is cut in two.

    The prompt ends after the last shared ``\\n\\nAssistant:``; without one, before the last shared run of whitespace,
    which then belongs to the completions. A shared head of one word gives an empty prompt.

    Raises:
        DropRow: the texts are identical.
    """
    if chosen == rejected:
        raise DropRow(IDENTICAL)
    common = os.path.commonprefix([chosen, rejected])
    room = min(len(chosen), len(rejected))  # a prompt of this length or more would empty the shorter answer
    cut = _turn_end(common, room)
    if cut is None:
        cut = _word_boundary(chosen, rejected, len(common))
    return chosen[:cut], chosen[cut:], rejected[cut:]


def split_messages(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """``(prompt, chosen, rejected)`` for two conversations: the leading messages they share, each side keeping one.

    Raises:
        DropRow: the conversations are identical.
    """
    if chosen == rejected:
        raise DropRow(IDENTICAL)
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def without_prompt(prompt: list[Message], messages: list[Message]) -> list[Message]:
    """``messages`` without the prompt that many published datasets repeat at their head."""
    repeats = len(messages) > len(prompt) and messages[: len(prompt)] == prompt
    return messages[len(prompt) :] if repeats else messages


def _turn_end(common: str, room: int) -> int | None:
    """End of the last ``HH_TURN`` in ``common`` that leaves both answers something, if there is one."""
    start = common.rfind(HH_TURN)
    while start >= 0:
        if start + len(HH_TURN) < room:
            return start + len(HH_TURN)
        start = common.rfind(HH_TURN, 0, start + len(HH_TURN) - 1)
    return None


def _word_boundary(chosen: str, rejected: str, length: int) -> int:
    """Start of the last run of whitespace at or before ``length`` where both texts go on with whitespace."""
    cut = min(length, len(chosen) - 1, len(rejected) - 1)
    while cut > 0 and not (chosen[cut].isspace() and rejected[cut].isspace()):
        cut -= 1
    while cut > 0 and chosen[cut - 1].isspace():
        cut -= 1
    return max(cut, 0)


def text_of(row: Mapping[str, Any], key: str, where: str) -> Text:
    """The text in column ``key``; ``where`` names the row in messages.

    Raises:
        DataError: it is neither a string nor messages, or holds a faulty message.
    """
    value = row[key]
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{where}: {key} is {show(value)}; give a string or a list of {{role, content}} messages")
    if not value and key != "prompt":
        raise DataError(f"{where}: {key} is an empty list; give at least one message")
    return [_message(message, f"{where}: {key}[{number}]") for number, message in enumerate(value)]


def check_same_kind(where: str, **texts: Text) -> None:
    """Check that two texts are both strings or both messages.

    Raises:
        DataError: they are not.
    """
    (first, one), (second, other) = texts.items()
    if isinstance(one, str) is not isinstance(other, str):
        remedy = "give both as strings or both as messages"
        if first == "prompt" and isinstance(one, str):
            remedy += ", or remove the prompt column where the answers contain the prompt's messages"
        raise DataError(f"{where}: {first} is {type_name(one)} but {second} is {type_name(other)}; {remedy}")


def split_conversation(row: Mapping[str, Any], key: str, where: str) -> tuple[list[Message], list[Message]]:
    """A conversation that ends with the answer, as prompt and completion of one message.

    Raises:
        DataError: it is no conversation, or another than the assistant has the last word.
    """
    text = text_of(row, key, where)
    if isinstance(text, str):
        raise DataError(f"{where}: {key} is {show(text)}; give a list of {{role, content}} messages")
    if text[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: the last of its {key} has role {show(text[-1]['role'])}; end it with the assistant's"
        )
    return text[:-1], text[-1:]


def template_variables(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the row hands to the chat template besides its messages; both columns may hold JSON texts.

    Raises:
        DataError: ``tools`` is no list, or ``chat_template_kwargs`` no object.
    """
    extra, tools = (_parsed(row, key, where) for key in ("chat_template_kwargs", "tools"))
    if extra is not None and not isinstance(extra, Mapping):
        raise DataError(f"{where}: chat_template_kwargs is {show(extra)}; give an object of template variables")
    variables = {key: value for key, value in (extra or {}).items() if value is not None}
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools is {show(tools)}; give a list of tool descriptions")
    return {**variables, "tools": tools} if tools else variables


def without_nulls(value: Any) -> Any:
    """``value`` without the null entries of its objects, which Arrow adds where only other rows have the key."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(row: Mapping[str, Any], key: str, where: str) -> Any:
    value = row.get(key)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError as error:
        raise DataError(f"{where}: {key} is {show(value)}, which is not valid JSON: {one_line(error)}") from error


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"{where} is {show(message)}; give messages as {{role, content}}")
    if message.get("role") is None and message.get("from") is not None:
        message = _spoken(message, where)
    if "role" not in message:
        raise DataError(f"{where} has no role (it has: {listing(message)}); give messages as {{role, content}}")
    if not isinstance(message["role"], str):
        raise DataError(f"{where}.role is {show(message['role'])}; set it to a string")
    # Arrow fills keys that only other messages have with nulls; templates would take them for values. And some take
    # the presence of tool_calls for a call.
    kept = {k: v for k, v in message.items() if v is not None and not (k == "tool_calls" and v == [])}
    return kept | _content(message, where)


def _content(message: Mapping[str, Any], where: str) -> Message:
    """``content`` as one string, or null beside calls of tools; and these calls, if there are any."""
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise DataError(f"{where}.tool_calls is {show(calls)}; give a list of calls")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if isinstance(content, str) or (content is None and calls):
        return {"content": content}
    if "content" not in message:
        raise DataError(f"{where} has no content (it has: {listing(message)}); give messages as {{role, content}}")
    raise DataError(f"{where}.content is {show(content)}; set it to a string")


def _part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, Mapping) and part.get("type") not in (None, "text"):
        raise DataError(f"{where} is of type {show(part['type'])}; only text can be trained on, leave the row out")
    raise DataError(f'{where} is {show(part)}; give parts as {{"type": "text", "text": …}}')


def _spoken(turn: Mapping[str, Any], where: str) -> Message:
    """A ShareGPT turn as a message."""
    speaker, value = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise DataError(f"{where}.from is {show(speaker)}; set it to one of {listing(_SPEAKERS)}")
    if not isinstance(value, str):
        raise DataError(f"{where}.value is {show(value)}; set it to a string")
    return _calling(value, where) if speaker == "function_call" else {"role": _SPEAKERS[speaker], "content": value}


def _calling(value: str, where: str) -> Message:
    """The assistant's message that calls the function or functions described by a JSON text."""
    try:
        calls = json.loads(value)
    except ValueError as error:
        raise DataError(f"{where}.value is {show(value)}, which is not valid JSON: {one_line(error)}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        raise DataError(f'{where}.value is {show(value)}; write the call as {{"name": …, "arguments": …}}')
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    called = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": None, "tool_calls": called}
