"""Normalize texts to what chat templates accept: a string, or a list of ``{role, content}`` messages.

Also accepted are ShareGPT's ``{from, value}`` turns, a single message that is not in a list, content as a list of text
parts, and the assistant's tool calls, whose content may be null. This module also extracts the implicit prompt, the
common prefix of ``chosen`` and ``rejected``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from alignment.config.errors import DataError, listing, one_line, show, type_name

HH_TURN = "\n\nAssistant:"  # the turn marker of Anthropic's HH dataset
IDENTICAL = "chosen and rejected are identical"
CUT_ALIKE = "chosen and rejected are identical after truncation"

# Chat templates may know others, such as ipython.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Message = dict[str, Any]
Text = str | list[Message]
# ShareGPT's speaker names -> roles of chat templates.
_SPEAKERS = {
    **{name: name for name in ("system", "user", "assistant", "tool")},
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


class DropRow(Exception):
    """Raised for a row that cannot be used and is dropped; the data report counts dropped rows by ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts with a common prefix into ``(prompt, chosen, rejected)``. Neither completion becomes empty.

    The prompt ends after the last common ``\\n\\nAssistant:``; without one, before the last common whitespace, which
    then belongs to the completions, so that no word is split. A common prefix of one word gives an empty prompt.

    Raises:
        DropRow: the texts are identical.
    """
    if chosen == rejected:
        raise DropRow(IDENTICAL)
    common = os.path.commonprefix([chosen, rejected])
    room = min(len(chosen), len(rejected))  # a prompt of at least this length would leave the shorter completion empty
    cut = _turn_end(common, room)
    if cut is None:
        cut = _word_boundary(chosen, rejected, len(common))
    return chosen[:cut], chosen[cut:], rejected[cut:]


def split_messages(
    chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Split two conversations into ``(prompt, chosen, rejected)``. The prompt is their common leading messages.

    At least one message is left in each completion.

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
    """Return ``messages`` without the prompt, which many published datasets repeat at the start of completions."""
    repeats = len(messages) > len(prompt) and messages[: len(prompt)] == prompt
    return messages[len(prompt) :] if repeats else messages


def _turn_end(common: str, room: int) -> int | None:
    """Return the end of the last ``HH_TURN`` in ``common`` that leaves both completions non-empty, if any."""
    start = common.rfind(HH_TURN)
    while start >= 0:
        if start + len(HH_TURN) < room:
            return start + len(HH_TURN)
        start = common.rfind(HH_TURN, 0, start + len(HH_TURN) - 1)
    return None


def _word_boundary(chosen: str, rejected: str, length: int) -> int:
    """Return the start of the last whitespace at or before ``length`` that occurs in both texts."""
    cut = min(length, len(chosen) - 1, len(rejected) - 1)
    while cut > 0 and not (chosen[cut].isspace() and rejected[cut].isspace()):
        cut -= 1
    while cut > 0 and chosen[cut - 1].isspace():
        cut -= 1
    return max(cut, 0)


def text_of(row: Mapping[str, Any], key: str, where: str) -> Text:
    """Return the text in column ``key``; ``where`` names the row in messages.

    Raises:
        DataError: the value is neither a string nor messages, or contains an invalid message.
    """
    value = row[key]
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"{where}: {key} is {show(value)}; expected a string or a list of {{role, content}} messages")
    if not value and key != "prompt":
        raise DataError(f"{where}: {key} is an empty list; expected at least one message")
    return [_message(message, f"{where}: {key}[{number}]") for number, message in enumerate(value)]


def completion_of(row: Mapping[str, Any], key: str, where: str) -> Text:
    """Return the completion in column ``key``.

    Raises:
        DataError: see :func:`text_of`; or the last message is not the assistant's.
    """
    text = text_of(row, key, where)
    if not isinstance(text, str) and text[-1]["role"] != "assistant":
        raise DataError(f"{where}: the last message in {key} has role {show(text[-1]['role'])}; expected 'assistant'")
    return text


def check_same_kind(where: str, **texts: Text) -> None:
    """Check that two texts are both strings or both messages.

    Raises:
        DataError: one is a string and the other one messages.
    """
    (first, one), (second, other) = texts.items()
    if isinstance(one, str) is not isinstance(other, str):
        remedy = "use strings for both or messages for both"
        if first == "prompt" and isinstance(one, str):
            remedy += ", or remove the prompt column if the completions contain the prompt's messages"
        raise DataError(f"{where}: {first} is {type_name(one)} but {second} is {type_name(other)}; {remedy}")


def split_conversation(row: Mapping[str, Any], key: str, where: str) -> tuple[list[Message], list[Message]]:
    """Split a conversation into the prompt and a completion, its final assistant message.

    Raises:
        DataError: the value is not a conversation, or the last message is not the assistant's.
    """
    text = completion_of(row, key, where)
    if isinstance(text, str):
        raise DataError(f"{where}: {key} is {show(text)}; expected a list of {{role, content}} messages")
    return text[:-1], text[-1:]


def template_variables(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the row's variables for the chat template. Both columns may contain JSON strings.

    Raises:
        DataError: ``tools`` is not a list, or ``chat_template_kwargs`` is not an object.
    """
    extra, tools = (_parsed(row, key, where) for key in ("chat_template_kwargs", "tools"))
    if extra is not None and not isinstance(extra, Mapping):
        raise DataError(f"{where}: chat_template_kwargs is {show(extra)}; expected an object with template variables")
    variables = {key: value for key, value in (extra or {}).items() if value is not None}
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools is {show(tools)}; expected a list of tool descriptions")
    return {**variables, "tools": tools} if tools else variables


def without_nulls(value: Any) -> Any:
    """Return ``value`` without null entries of objects, which Arrow adds for keys that only other rows have."""
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
        raise DataError(f"{where} is {show(message)}; expected a {{role, content}} message")
    if message.get("role") is None and message.get("from") is not None:
        message = _spoken(message, where)
    if "role" not in message:
        raise DataError(f"{where} has no role (keys: {listing(message)}); expected a {{role, content}} message")
    if not isinstance(message["role"], str):
        raise DataError(f"{where}.role is {show(message['role'])}; expected a string")
    # Arrow adds nulls for keys that only other messages have, which templates would treat as values. Some templates
    # also treat an empty tool_calls as a call.
    kept = {k: v for k, v in message.items() if v is not None and not (k == "tool_calls" and v == [])}
    return kept | _content(message, where)


def _content(message: Mapping[str, Any], where: str) -> Message:
    """Return ``content`` as one string, or null for a message with tool calls, which are also returned."""
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise DataError(f"{where}.tool_calls is {show(calls)}; expected a list of calls")
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{number}]") for number, part in enumerate(content))
    if isinstance(content, str) or (content is None and calls):
        return {"content": content}
    if "content" not in message:
        raise DataError(f"{where} has no content (keys: {listing(message)}); expected a {{role, content}} message")
    raise DataError(f"{where}.content is {show(content)}; expected a string")


def _part(part: object, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, Mapping) and part.get("type") not in (None, "text"):
        raise DataError(f"{where} has type {show(part['type'])}; only text is supported; remove the row")
    raise DataError(f'{where} is {show(part)}; expected {{"type": "text", "text": …}}')


def _spoken(turn: Mapping[str, Any], where: str) -> Message:
    """Convert a ShareGPT turn to a message."""
    speaker, value = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise DataError(f"{where}.from is {show(speaker)}; expected one of {listing(_SPEAKERS)}")
    if not isinstance(value, str):
        raise DataError(f"{where}.value is {show(value)}; expected a string")
    return _calling(value, where) if speaker == "function_call" else {"role": _SPEAKERS[speaker], "content": value}


def _calling(value: str, where: str) -> Message:
    """Convert a JSON string that describes one or more function calls to an assistant message."""
    try:
        calls = json.loads(value)
    except ValueError as error:
        raise DataError(f"{where}.value is {show(value)}, which is not valid JSON: {one_line(error)}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        raise DataError(f'{where}.value is {show(value)}; expected a call such as {{"name": …, "arguments": …}}')
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    called = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": None, "tool_calls": called}
