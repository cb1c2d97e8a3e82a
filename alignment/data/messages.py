"""Read the texts of a row: each is a string, or a list of the ``{role, content}`` messages that chat templates accept.

Also accepted are ShareGPT's ``{from, value}`` turns, a single message that is not in a list, content as a list of text
parts, and the assistant's tool calls, whose content may be null. All texts of a row have the same form. Every invalid
value raises a :class:`~alignment.config.errors.DataError` that names the row, the key, the value and the fix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

from alignment.config.errors import DataError, listing, one_line, show, type_name

# Chat templates may know others, such as ipython.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Row = Mapping[str, Any]
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
# Columns with variables for the chat template -> their type, and what is expected of them.
_VARIABLES: dict[str, tuple[type, str]] = {
    "chat_template_kwargs": (Mapping, "an object with template variables"),  # type: ignore[type-abstract]
    "tools": (list, "a list of tool descriptions"),
}


@dataclass(frozen=True)
class Source:
    """A row as text: a prompt with its completions, if any, which are all strings or all messages.

    Attributes:
        prompt, completions: the texts.
        place: name of the row in errors.
        template: variables for the chat template, such as ``tools``.
        further: what a kind of rows has beside texts, such as labels.
    """

    prompt: Text
    completions: tuple[Text, ...]
    place: str
    template: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)


def source_of(row: Row, where: str, prompt: Text | None, **completions: Text) -> Source:
    """Return a row as text, with the system message and the template variables of its other columns.

    Messages of the prompt that completions repeat, as in many published datasets, are removed from them. ``tools`` and
    ``chat_template_kwargs`` may contain JSON strings.

    Raises:
        DataError: the prompt is missing, a completion has another form, or a system message or variables are invalid.
    """
    if prompt is None:
        raise DataError(f'{where}: prompt is missing; every row must have one (use "" or [] for an empty prompt)')
    for name, completion in completions.items():
        if isinstance(prompt, str) is not isinstance(completion, str):
            raise different_forms(where, prompt=prompt, **{name: completion})
    answers = tuple(completions.values())
    if isinstance(prompt, list):
        size = len(prompt)
        answers = tuple(one[size:] if one[:size] == prompt and len(one) > size else one for one in answers)
    system = row.get("system")
    if system not in (None, ""):
        if not isinstance(system, str):
            raise DataError(f"{where}: system is {show(system)}; expected a string")
        if not isinstance(prompt, list):
            raise DataError(
                f"{where}: system requires a conversation, but prompt is a string; convert prompt to messages"
            )
        if prompt and prompt[0]["role"] == "system":
            raise DataError(
                f"{where}: system is set, but the messages already start with a system message; remove one"
            )
        prompt = [{"role": "system", "content": system}, *prompt]
    variables: dict[str, Any] = {}
    for name, (kind, expected) in _VARIABLES.items():
        value = row.get(name)
        if isinstance(value, str):
            value = _json(value, f"{where}: {name}") if value.strip() else None
        if not isinstance(value, (kind, NoneType)):
            raise DataError(f"{where}: {name} is {show(value)}; expected {expected}")
        entries = value if isinstance(value, Mapping) else {name: value or None}
        variables |= {key: entry for key, entry in entries.items() if entry is not None}
    return Source(prompt, answers, where, variables)


def text_of(row: Row, key: str, where: str, *, answer: bool = False) -> Text:
    """Return the text in column ``key``; ``where`` names the row in messages.

    Raises:
        DataError: the value is neither a string nor messages, or contains an invalid message; or, for an ``answer``,
            the last message is not the assistant's.
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
    text = [_message(message, f"{where}: {key}[{number}]") for number, message in enumerate(value)]
    if answer and text[-1]["role"] != "assistant":
        raise DataError(f"{where}: the last message in {key} has role {show(text[-1]['role'])}; expected 'assistant'")
    return text


def different_forms(where: str, **texts: Text) -> DataError:
    """Return the error about two texts of which one is a string and the other one messages."""
    (first, one), (second, other) = texts.items()
    remedy = "use strings for both or messages for both"
    if first == "prompt" and isinstance(one, str):
        remedy += ", or remove the prompt column if the completions contain the prompt's messages"
    return DataError(f"{where}: {first} is {type_name(one)} but {second} is {type_name(other)}; {remedy}")


def prompt_of(row: Row, where: str) -> Text | None:
    """Return the row's prompt, followed by its ``query`` on a new line, or None if it has no prompt."""
    prompt = None if row.get("prompt") is None else text_of(row, "prompt", where)
    query = row.get("query")
    if query in (None, ""):
        return prompt
    if not isinstance(prompt, str) or not isinstance(query, str):
        raise DataError(
            f"{where}: query is {show(query)} and prompt is {show(row.get('prompt'))}; expected strings; fix them, or "
            "remove query from column_map"
        )
    return f"{prompt}\n{query}" if prompt else query


def conversation(row: Row, key: str, where: str) -> Source:
    """Return a row with ``messages`` as text: the completion is the final message, which is the assistant's."""
    refuse_mapped(row, key, where, "query")
    text = text_of(row, key, where, answer=True)
    if isinstance(text, str):
        raise DataError(f"{where}: {key} is {show(text)}; expected a list of {{role, content}} messages")
    return source_of(row, where, text[:-1], completion=text[-1:])


NOTHING_SAID: Text = [{"role": "assistant", "content": ""}]


def as_turns(row: Row, where: str) -> dict[str, Any]:
    """Return a row, with strings as messages: one user turn, unless the prompt is empty, and one assistant turn.

    Raises:
        DataError: strings without a column that tells where the completion begins.
    """
    answers = [key for key in ("completion", "chosen", "rejected") if row.get(key) is not None]
    texts = [row[key] for key in ("prompt", "messages", "conversations", *answers) if row.get(key) is not None]
    if not all(isinstance(text, str) for text in texts):
        return dict(row)
    prompt = prompt_of(row, where)
    if prompt is None:
        raise DataError(
            f"{where}: prompt is missing, so apply_chat_template cannot tell the user's turn from the assistant's; "
            "add a prompt column, use messages, or set apply_chat_template: false"
        )
    asked = [{"role": "user", "content": prompt}] if prompt else []
    said = {key: [{"role": "assistant", "content": row[key]}] for key in answers}
    return {**row, "query": None, "prompt": asked, **said}


def refuse_mapped(row: Row, key: str, where: str, *names: str) -> None:
    """Reject values of mapped columns that cannot be added to the text in column ``key``."""
    for name in names:
        if row.get(name) not in (None, ""):
            raise DataError(
                f"{where}: {name} is {show(row[name])}, but the row has {key} and no prompt to add it to; "
                f"remove {name} from column_map"
            )


def without_nulls(value: Any) -> Any:
    """Return ``value`` without null entries of objects, which Arrow adds for keys that only other rows have."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{name} is {show(text)}, which is not valid JSON: {one_line(error)}") from error


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
    form, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
    if form == "text" and isinstance(text, str):
        return text
    if form not in (None, "text"):
        raise DataError(f"{where} has type {show(form)}; only text is supported; remove the row")
    raise DataError(f'{where} is {show(part)}; expected {{"type": "text", "text": …}}')


def _spoken(turn: Mapping[str, Any], where: str) -> Message:
    """Convert a ShareGPT turn, in which calls of functions are a JSON string."""
    speaker, value = turn["from"], turn.get("value")
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise DataError(f"{where}.from is {show(speaker)}; expected one of {listing(_SPEAKERS)}")
    if not isinstance(value, str):
        raise DataError(f"{where}.value is {show(value)}; expected a string")
    if speaker != "function_call":
        return {"role": _SPEAKERS[speaker], "content": value}
    calls = _json(value, f"{where}.value")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call and "arguments" in call for call in calls):
        raise DataError(f'{where}.value is {show(value)}; expected a call such as {{"name": …, "arguments": …}}')
    functions = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
    called = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": None, "tool_calls": called}
