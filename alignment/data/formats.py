"""Convert a row in any accepted format to a canonical, validated row.

The row types have the names used by TRL. Text is a string (standard rows) or a list of messages (conversational rows),
the same for all columns of a row. Every invalid value raises a :class:`~alignment.config.errors.DataError` that names
the row, the key, the value and the fix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from alignment.config.errors import DataError, show
from alignment.data.messages import (
    IDENTICAL,
    DropRow,
    Message,
    Text,
    check_same_kind,
    completion_of,
    split_conversation,
    split_messages,
    split_texts,
    template_variables,
    text_of,
    without_prompt,
)

Kind = Literal["unpaired_preference", "preference", "preference_margin", "prompt_completion", "prompt_only"]
"""The kind of rows that a method trains on.

- ``unpaired_preference`` (KTO): a completion with a label. A pair is also accepted and becomes two rows.
- ``preference`` (CPO, DPO): a chosen and a rejected completion.
- ``preference_margin`` (reward models): a pair with the margin by which the chosen completion is better.
- ``prompt_completion`` (SFT): a target completion. Full conversations and plain text are also accepted.
- ``prompt_only`` (Online DPO): a prompt for which the policy generates completions.
"""
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class UnpairedPreference:
    """A completion and whether it is desirable.

    ``template`` has variables for the chat template, such as ``tools``.
    """

    prompt: Text
    completion: Text
    label: bool
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preference:
    """Two completions of one prompt."""

    prompt: Text
    chosen: Text
    rejected: Text
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptCompletion:
    """A target completion. If ``whole``, the loss includes the prompt's tokens."""

    prompt: Text
    completion: Text
    template: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class PromptOnly:
    """A prompt for which the policy generates completions."""

    prompt: Text
    template: Mapping[str, Any] = field(default_factory=dict)


def unpaired_rows(row: Mapping[str, Any], where: str) -> list[UnpairedPreference]:
    """Convert a row to canonical KTO rows: one for a labeled completion; two for a pair, True then False.

    Args:
        row: one row of the dataset: ``prompt, completion, label``, or ``messages, label``, or a pair. Columns that
            only other rows use are null.
        where: name of the row in messages, such as ``data.jsonl, row 12``.

    Raises:
        DataError: the row is invalid.
        DropRow: the row is a pair that cannot be split into prompt and completions.
    """
    if _is_pair(row, where):
        pair = preference_row(row, where)
        return [
            UnpairedPreference(pair.prompt, pair.chosen, True, pair.template),
            UnpairedPreference(pair.prompt, pair.rejected, False, pair.template),
        ]
    label = label_of(row, where)
    if row.get("completion") is None and row.get("messages") is not None:
        prompt, completion = _conversation(row, where)
    else:
        prompt, completion = _answered(row, where)
    return [UnpairedPreference(prompt, completion, label, template_variables(row, where))]


def label_of(row: Mapping[str, Any], where: str) -> bool:
    """Return whether the row's completion is desirable.

    Raises:
        DataError: the label is neither true nor false.
    """
    label = row["label"]
    if type(label) is not bool:
        raise DataError(f"{where}: label is {show(label)}; expected true or false")
    return label


def preference_row(row: Mapping[str, Any], where: str) -> Preference:
    """Convert a row with ``chosen``, ``rejected`` and, optionally, ``prompt`` to a canonical pair.

    Without a prompt column, the prompt is the common prefix of both completions. Messages of the prompt that are
    repeated in the completions are removed from them.

    Raises:
        DataError: the row is invalid.
        DropRow: the completions are identical.
    """
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            raise DataError(f"{where}: {key} is missing; every row must have chosen and rejected")
    chosen, rejected = completion_of(row, "chosen", where), completion_of(row, "rejected", where)
    check_same_kind(where, chosen=chosen, rejected=rejected)
    prompt = _prompt(row, where)
    if prompt is None:
        if isinstance(chosen, str) and isinstance(rejected, str):
            prompt, chosen, rejected = split_texts(chosen, rejected)
        else:
            assert isinstance(chosen, list) and isinstance(rejected, list)
            prompt, chosen, rejected = split_messages(chosen, rejected)
    elif isinstance(prompt, str) and isinstance(chosen, list) and isinstance(rejected, list):
        prompt, chosen, rejected = _spoken_prompt(prompt, chosen, rejected)
    check_same_kind(where, prompt=prompt, chosen=chosen)
    if isinstance(prompt, list) and isinstance(chosen, list) and isinstance(rejected, list):
        chosen, rejected = without_prompt(prompt, chosen), without_prompt(prompt, rejected)
    if chosen == rejected:
        raise DropRow(IDENTICAL)
    return Preference(_with_system(prompt, row, where), chosen, rejected, template_variables(row, where))


def _spoken_prompt(prompt: str, chosen: list[Message], rejected: list[Message]) -> tuple[Text, Text, Text]:
    """Handle a string prompt with conversational completions: it is a user message in both or precedes both."""
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return [{"role": "user", "content": prompt}], chosen, rejected
    shared, better, worse = split_messages(chosen, rejected)
    asked = [message["content"] for message in shared if message["role"] == "user"]
    if prompt.strip() in [str(content).strip() for content in asked]:
        return shared, better, worse
    return prompt, chosen, rejected


def margin_of(row: Mapping[str, Any], where: str) -> float:
    """Return the margin of a pair: column ``margin``, or 0 if it is null, empty or missing.

    A string is parsed as a number, because CSV files only have strings. A list with one number, the format of TRL up
    to 0.23, is also accepted.

    Raises:
        DataError: the margin is not a finite number that fits in 32 bits.
    """
    value = row.get("margin")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value is None or (isinstance(value, str) and not value.strip()):
        return 0.0
    margin = float("nan")
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            margin = float(value)
    if not abs(margin) <= _LARGEST:
        raise DataError(f"{where}: margin is {show(value)}; expected a finite number or null")
    return margin


def prompt_completion_row(row: Mapping[str, Any], where: str, completion_only: bool | None = None) -> PromptCompletion:
    """Convert a row with ``prompt, completion``, with ``messages`` or with ``text`` to a canonical row.

    Args:
        row: one row of the dataset.
        where: name of the row in messages.
        completion_only: True: the loss covers the completion only (the last message of ``messages``). False: it covers
            the full row. None: the completion of ``prompt, completion``, the full row of other formats.

    Raises:
        DataError: the row is invalid, or plain text would have to be split into prompt and completion.
    """
    template = template_variables(row, where)
    if row.get("completion") is not None:
        return PromptCompletion(*_answered(row, where), template, whole=completion_only is False)
    for key in ("messages", "text"):
        if row.get(key) is not None:
            if isinstance(row[key], str):
                _refuse_mapped(row, where, key, "query", "system")
                if completion_only:
                    raise DataError(
                        f"{where}: completion_only_loss requires a separate completion, but {key} is plain text; use "
                        "the columns prompt and completion"
                    )
                return PromptCompletion("", row[key], whole=True)  # a text has no chat template
            if completion_only:
                return PromptCompletion(*_conversation(row, where, key), template)
            _refuse_mapped(row, where, key, "query")
            return PromptCompletion([], _with_system(_messages(row, key, where), row, where), template, whole=True)
    raise DataError(f"{where}: completion is missing; every row must have prompt and completion, or messages, or text")


def _messages(row: Mapping[str, Any], key: str, where: str) -> Text:
    text = text_of(row, key, where)
    if isinstance(text, str):
        raise DataError(f"{where}: {key} is {show(text)}; expected a list of {{role, content}} messages")
    return text


def prompt_only_row(row: Mapping[str, Any], where: str) -> PromptOnly:
    """Convert a row with a ``prompt`` to a canonical row.

    Raises:
        DataError: the row is invalid.
    """
    prompt = _prompt(row, where)
    if prompt is None:
        raise DataError(f'{where}: prompt is missing; every row must have one (use "" or [] for an empty prompt)')
    return PromptOnly(_with_system(prompt, row, where), template_variables(row, where))


def _is_pair(row: Mapping[str, Any], where: str) -> bool:
    """Return whether a KTO row is a pair. A dataset may contain both pairs and labeled completions."""
    answers = [row.get(key) is not None for key in ("chosen", "rejected")]
    if row.get("completion") is None or row.get("label") is None:
        return any(answers) or "label" not in row
    if all(answers):
        raise DataError(f"{where}: both completion, label and chosen, rejected are set; keep one of the two formats")
    return False


def _answered(row: Mapping[str, Any], where: str) -> tuple[Text, Text]:
    """Return the prompt and completion of a row that has both."""
    prompt = _prompt(row, where)
    if prompt is None:
        raise DataError(f'{where}: prompt is missing; every row must have one (use "" or [] for an empty prompt)')
    completion = completion_of({"completion": None, **row}, "completion", where)
    check_same_kind(where, prompt=prompt, completion=completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        completion = without_prompt(prompt, completion)
    return _with_system(prompt, row, where), completion


def _conversation(row: Mapping[str, Any], where: str, key: str = "messages") -> tuple[Text, Text]:
    """Split a conversation into the prompt and the final assistant message."""
    _refuse_mapped(row, where, key, "query")
    prompt, completion = split_conversation(row, key, where)
    return _with_system(prompt, row, where), completion


def _refuse_mapped(row: Mapping[str, Any], where: str, key: str, *names: str) -> None:
    """Reject values of mapped columns that cannot be added to the text in column ``key``."""
    for name in names:
        if row.get(name) not in (None, ""):
            raise DataError(
                f"{where}: {name} is {show(row[name])}, but the row has {key} and no prompt to add it to; "
                f"remove {name} from column_map"
            )


def _prompt(row: Mapping[str, Any], where: str) -> Text | None:
    """Return the row's prompt, followed by its ``query`` on a new line, or None if it has no prompt."""
    prompt = None if row.get("prompt") is None else text_of(row, "prompt", where)
    query = row.get("query")
    if query is None or query == "":
        return prompt
    if not isinstance(prompt, str) or not isinstance(query, str):
        raise DataError(
            f"{where}: query is {show(query)} and prompt is {show(row.get('prompt'))}; expected strings; fix them, or "
            "remove query from column_map"
        )
    return f"{prompt}\n{query}" if prompt else query


def _with_system(prompt: Text, row: Mapping[str, Any], where: str) -> Text:
    """Return the prompt, preceded by the system message in column ``system`` if present."""
    system = row.get("system")
    if system is None or system == "":
        return prompt
    if not isinstance(system, str):
        raise DataError(f"{where}: system is {show(system)}; expected a string")
    if not isinstance(prompt, list):
        raise DataError(f"{where}: system requires a conversation, but prompt is a string; convert prompt to messages")
    if prompt and prompt[0]["role"] == "system":
        raise DataError(f"{where}: system is set, but the messages already start with a system message; remove one")
    return [{"role": "system", "content": system}, *prompt]
