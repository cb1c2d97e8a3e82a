"""Functions that scripts use to convert rows before training.

The trainers do not need them: they read every format as it is (``docs/guides/data.md``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from alignment.config.errors import DataError, listing

_TEXTS = ("prompt", "completion", "chosen", "rejected", "messages")
_SHAPES = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "completion", "label"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
)


def is_conversational(example: Mapping[str, Any]) -> bool:
    """Whether a row's texts are lists of ``{role, content}`` messages."""
    texts = [example[key] for key in _TEXTS if key in example]
    return bool(texts) and all(_is_messages(text) for text in texts)


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and isinstance(value[0], Mapping)
        and {"role", "content"} <= {*value[0]}
    )


def apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Sequence[Any] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """Format a conversational row as text with the tokenizer's chat template.

    A prompt ends where the completion begins: with the template's generation prompt after a user message, without an
    end of turn after an assistant message. A completion is the text that follows. ``messages`` become ``text``.

    Args:
        example: a row with ``messages``, ``prompt``, ``prompt`` and ``completion`` (and ``label``), or ``chosen`` and
            ``rejected`` with or without ``prompt``; optionally ``chat_template_kwargs``.
        tokenizer: a tokenizer with a chat template.
        tools: descriptions of tools, or functions, for the template.
        **template_kwargs: further variables of the template.

    Raises:
        KeyError: the row has other keys.
        ValueError: the prompt ends with neither a user nor an assistant message.
    """
    keys = {key for key in example if key in {*_TEXTS, "label"}}
    if keys not in _SHAPES:
        raise KeyError(f"Invalid keys in the example: {listing(keys)}; expected {' or '.join(map(str, _SHAPES))}")
    variables = {**(example.get("chat_template_kwargs") or {}), **template_kwargs}

    def written(messages: list[Any], **ending: bool) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **ending, **variables))

    label = {"label": example["label"]} if "label" in example else {}
    if "messages" in example:
        return {"text": written(example["messages"])}
    answers = [key for key in ("chosen", "rejected", "completion") if key in example]
    if "prompt" not in example:
        return {key: written(example[key]) for key in answers}
    last = example["prompt"][-1]["role"]
    if last not in ("user", "tool", "assistant"):
        raise ValueError(f"Invalid role in the last message: {last}; end the prompt with a user or assistant message")
    prompt = written(
        example["prompt"], add_generation_prompt=last != "assistant", continue_final_message=last == "assistant"
    )
    whole = {key: written(example["prompt"] + example[key]) for key in answers}
    # Some templates start a completion differently than their generation prompt; the prompt is the common prefix.
    prompt = os.path.commonprefix([prompt, *whole.values()])
    return {"prompt": prompt, **{key: text[len(prompt) :] for key, text in whole.items()}, **label}


def maybe_apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Sequence[Any] | None = None, **template_kwargs: Any
) -> Any:
    """Apply :func:`apply_chat_template` to a conversational row; return any other row unchanged."""
    return apply_chat_template(example, tokenizer, tools, **template_kwargs) if is_conversational(example) else example


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """Split the common prompt off ``chosen`` and ``rejected``.

    Texts are split before the space that precedes the first difference, conversations between messages.

    Raises:
        DataError: the two are identical.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    if chosen == rejected:
        raise DataError("chosen and rejected are identical; remove the row")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def maybe_extract_prompt(example: Mapping[str, Any]) -> Any:
    """Apply :func:`extract_prompt` to a pair without a prompt, or with one of another format than its completions."""
    if "chosen" not in example or "rejected" not in example:
        return example
    if "prompt" in example and _is_messages(example["prompt"]) == _is_messages(example["chosen"]):
        return example
    return extract_prompt(example)


def unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Convert a dataset (or splits) of pairs to rows with ``completion`` and ``label``.

    In each batch of 1000 rows, the chosen completions come before the rejected ones.
    """
    return dataset.map(_unpaired, batched=True, remove_columns=["chosen", "rejected"], num_proc=num_proc, desc=desc)


def _unpaired(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    pairs = len(rows["chosen"])
    result = {"completion": rows["chosen"] + rows["rejected"], "label": [True] * pairs + [False] * pairs}
    others = {key: values for key, values in rows.items() if key not in ("chosen", "rejected")}
    return {**{key: values + values for key, values in others.items()}, **result}


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Apply :func:`unpair_preference_dataset` to a dataset of pairs; return any other dataset unchanged."""
    columns = dataset.column_names
    if isinstance(columns, Mapping):  # a DatasetDict
        columns = next(iter(columns.values()))
    return unpair_preference_dataset(dataset, num_proc, desc) if {"chosen", "rejected"} <= {*columns} else dataset
