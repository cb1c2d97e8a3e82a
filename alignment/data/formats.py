"""From a row in any accepted format to a canonical, checked one.

The types of rows go by TRL's names. Text is a string (standard rows) or a list of messages (conversational rows), the
same throughout a row. Every fault is a :class:`~alignment.config.errors.DataError` that names row, key, value and
remedy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from alignment.config.errors import DataError, show
from alignment.data.messages import (
    Message,
    Text,
    check_same_kind,
    split_conversation,
    split_messages,
    split_texts,
    template_variables,
    text_of,
    without_prompt,
)

Kind = Literal["unpaired_preference", "preference", "preference_margin", "prompt_completion", "prompt_only"]
"""What a method trains on.

- ``unpaired_preference`` (KTO): a completion with a label; pairs are accepted too, each as two rows.
- ``preference`` (CPO, DPO): a chosen and a rejected completion.
- ``preference_margin`` (reward models): the same, with the margin by which the chosen one is better.
- ``prompt_completion`` (SFT): a completion to imitate; whole conversations and texts are accepted too.
- ``prompt_only`` (Online DPO): a prompt that the policy completes.
"""
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class UnpairedPreference:
    """One answer and whether it is desirable. ``template`` goes to the chat template (``tools`` and so on)."""

    prompt: Text
    completion: Text
    label: bool
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better one first."""

    prompt: Text
    chosen: Text
    rejected: Text
    template: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptCompletion:
    """One answer to imitate; ``whole``: the prompt's tokens are learned as well."""

    prompt: Text
    completion: Text
    template: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class PromptOnly:
    """A prompt that the policy is to answer."""

    prompt: Text
    template: Mapping[str, Any] = field(default_factory=dict)


def unpaired_rows(row: Mapping[str, Any], where: str) -> list[UnpairedPreference]:
    """The canonical KTO rows of one row: one for an answer with a label; a pair gives two, True then False.

    Args:
        row: one row of the dataset: ``prompt, completion, label``, or ``messages, label``, or a pair. Columns that
            only other rows fill are null.
        where: names the row in messages, such as ``data.jsonl row 12``.

    Raises:
        DataError: the row is faulty.
        DropRow: a pair that cannot be split into prompt and completions.
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
    """Whether the row's completion is desirable.

    Raises:
        DataError: its label is neither true nor false.
    """
    label = row["label"]
    if type(label) is not bool:
        raise DataError(f"{where}: label is {show(label)}; set it to true or false")
    return label


def preference_row(row: Mapping[str, Any], where: str) -> Preference:
    """The canonical pair of one row with ``chosen``, ``rejected`` and, optionally, ``prompt``.

    Without a prompt it is the common head of both answers. Conversations that repeat the prompt's messages lose them.

    Raises:
        DataError: the row is faulty.
        DropRow: there is no prompt, and the answers are identical.
    """
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            raise DataError(f"{where}: {key} is missing; every row needs chosen and rejected")
    chosen, rejected = text_of(row, "chosen", where), text_of(row, "rejected", where)
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
    return Preference(_with_system(prompt, row, where), chosen, rejected, template_variables(row, where))


def _spoken_prompt(prompt: str, chosen: list[Message], rejected: list[Message]) -> tuple[Text, Text, Text]:
    """A text beside conversations, in which it is what the user says: in both of them, or before both answers."""
    if chosen[0]["role"] == rejected[0]["role"] == "assistant":
        return [{"role": "user", "content": prompt}], chosen, rejected
    shared, better, worse = split_messages(chosen, rejected)
    asked = [message["content"] for message in shared if message["role"] == "user"]
    if prompt.strip() in [str(content).strip() for content in asked]:
        return shared, better, worse
    return prompt, chosen, rejected


def margin_of(row: Mapping[str, Any], where: str) -> float:
    """By how much the chosen answer is better: column ``margin``, 0 where it is null, empty or not there.

    A text that reads as a number is taken as one, because a CSV file holds nothing else; so is a list of one number,
    as TRL's releases up to 0.23 wanted it.

    Raises:
        DataError: it is no finite number that fits 32 bits.
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
        raise DataError(f"{where}: margin is {show(value)}; set it to a finite number, or to null for none")
    return margin


def prompt_completion_row(row: Mapping[str, Any], where: str, completion_only: bool | None = None) -> PromptCompletion:
    """The canonical row of ``prompt, completion``, of ``messages`` or of ``text``.

    Args:
        row: one row of the dataset.
        where: names the row in messages.
        completion_only: learn the answer alone, which of ``messages`` is the last one; or (False) all of a row. None:
            the answer of ``prompt, completion``, all of the others.

    Raises:
        DataError: the row is faulty, or a text has to be divided.
    """
    template = template_variables(row, where)
    if row.get("completion") is not None:
        return PromptCompletion(*_answered(row, where), template, whole=completion_only is False)
    for key in ("messages", "text"):
        if row.get(key) is not None:
            if isinstance(row[key], str):
                if completion_only:
                    raise DataError(
                        f"{where}: completion_only_loss needs to know the completion, and {key} is one text; give "
                        "prompt and completion"
                    )
                return PromptCompletion("", row[key], whole=True)  # a text has no chat template
            if completion_only:
                return PromptCompletion(*_conversation(row, where, key), template)
            return PromptCompletion([], _with_system(_messages(row, key, where), row, where), template, whole=True)
    raise DataError(f"{where}: completion is missing; every row needs prompt and completion, or messages, or text")


def _messages(row: Mapping[str, Any], key: str, where: str) -> Text:
    text = text_of(row, key, where)
    if isinstance(text, str):
        raise DataError(f"{where}: {key} is {show(text)}; give a list of {{role, content}} messages")
    return text


def prompt_only_row(row: Mapping[str, Any], where: str) -> PromptOnly:
    """The canonical row of a ``prompt`` alone.

    Raises:
        DataError: the row is faulty.
    """
    prompt = _prompt(row, where)
    if prompt is None:
        raise DataError(f'{where}: prompt is missing; every row needs one (an empty one is "" or [])')
    return PromptOnly(_with_system(prompt, row, where), template_variables(row, where))


def _is_pair(row: Mapping[str, Any], where: str) -> bool:
    """Whether a row for KTO is a pair; in one dataset some rows may be, and others have a label."""
    answers = [row.get(key) is not None for key in ("chosen", "rejected")]
    if row.get("completion") is None or row.get("label") is None:
        return any(answers) or "label" not in row
    if all(answers):
        raise DataError(f"{where}: has completion and label, and chosen and rejected as well; keep one of the two")
    return False


def _answered(row: Mapping[str, Any], where: str) -> tuple[Text, Text]:
    """Prompt and completion of a row that has both."""
    prompt = _prompt(row, where)
    if prompt is None:
        raise DataError(f'{where}: prompt is missing; give one beside completion (an empty one is "" or [])')
    completion = text_of({"completion": None, **row}, "completion", where)
    check_same_kind(where, prompt=prompt, completion=completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        completion = without_prompt(prompt, completion)
    return _with_system(prompt, row, where), completion


def _conversation(row: Mapping[str, Any], where: str, key: str = "messages") -> tuple[Text, Text]:
    """Prompt and completion of a conversation that ends with the answer."""
    prompt, completion = split_conversation(row, key, where)
    return _with_system(prompt, row, where), completion


def _prompt(row: Mapping[str, Any], where: str) -> Text | None:
    """The row's prompt, with its ``query`` on a new line below; None where it has no prompt."""
    prompt = None if row.get("prompt") is None else text_of(row, "prompt", where)
    query = row.get("query")
    if query is None or query == "":
        return prompt
    if not isinstance(prompt, str) or not isinstance(query, str):
        raise DataError(
            f"{where}: query is {show(query)} and prompt is {show(row.get('prompt'))}; give both as strings, or leave "
            "query out of column_map"
        )
    return f"{prompt}\n{query}" if prompt else query


def _with_system(prompt: Text, row: Mapping[str, Any], where: str) -> Text:
    """The prompt after the system turn in column ``system``, if there is one."""
    system = row.get("system")
    if system is None or system == "":
        return prompt
    if not isinstance(system, str):
        raise DataError(f"{where}: system is {show(system)}; give a string")
    if not isinstance(prompt, list):
        raise DataError(f"{where}: system needs a conversation, but prompt is a string; give prompt as messages")
    if prompt and prompt[0]["role"] == "system":
        raise DataError(f"{where}: system is given, but its messages begin with a system turn already; keep one")
    return [{"role": "system", "content": system}, *prompt]
