"""Functions with which scripts change rows before a trainer sees them.

The trainers do none of this themselves and need none of it: they read every format as it is (README, "Data").
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
    """A conversational row as texts by the tokenizer's chat template.

    A prompt ends where the answer begins: with the template's generation prompt after a user's message, and open
    after an assistant's. An answer is what the template writes behind that. ``messages`` become ``text``.

    Args:
        example: messages under ``messages``, ``prompt``, ``prompt`` and ``completion`` (and ``label``), or ``chosen``
            and ``rejected`` with or without ``prompt``; perhaps ``chat_template_kwargs``.
        tokenizer: with a chat template.
        tools: descriptions of tools, or functions, for the template.
        **template_kwargs: further variables of the template.

    Raises:
        KeyError: other texts than these.
        ValueError: the prompt ends with neither a user's nor an assistant's message.
    """
    keys = {key for key in example if key in {*_TEXTS, "label"}}
    if keys not in _SHAPES:
        raise KeyError(f"Invalid keys in the example: {listing(keys)}; {' or '.join(map(str, _SHAPES))} are valid")
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
        raise ValueError(f"Invalid role in the last message: {last}; end the prompt with the user's or an assistant's")
    prompt = written(
        example["prompt"], add_generation_prompt=last != "assistant", continue_final_message=last == "assistant"
    )
    whole = {key: written(example["prompt"] + example[key]) for key in answers}
    # Some templates open an answer differently when they ask for one; the prompt is what all agree on.
    prompt = os.path.commonprefix([prompt, *whole.values()])
    return {"prompt": prompt, **{key: text[len(prompt) :] for key, text in whole.items()}, **label}


def maybe_apply_chat_template(
    example: Mapping[str, Any], tokenizer: Any, tools: Sequence[Any] | None = None, **template_kwargs: Any
) -> Any:
    """:func:`apply_chat_template` for a conversational row; any other row as it is."""
    return apply_chat_template(example, tokenizer, tools, **template_kwargs) if is_conversational(example) else example


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt that ``chosen`` and ``rejected`` begin with, and what is left of them.

    Texts are divided before the space that precedes the first difference, conversations between messages.

    Raises:
        DataError: the two are identical.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    if chosen == rejected:
        raise DataError("chosen and rejected are identical; leave the row out")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared and chosen[shared - 1] == " ":
        shared -= 1
    return {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def maybe_extract_prompt(example: Mapping[str, Any]) -> Any:
    """:func:`extract_prompt` for a row without a prompt, or whose prompt is of another kind than its answers."""
    if "chosen" not in example or "rejected" not in example:
        return example
    if "prompt" in example and _is_messages(example["prompt"]) == _is_messages(example["chosen"]):
        return example
    return extract_prompt(example)


def unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """A dataset of pairs, or several by split, as rows with ``completion`` and ``label``: the chosen ones first.

    The chosen answers of a batch of 1000 rows come before its rejected ones.
    """
    return dataset.map(_unpaired, batched=True, remove_columns=["chosen", "rejected"], num_proc=num_proc, desc=desc)


def _unpaired(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    pairs = len(rows["chosen"])
    result = {"completion": rows["chosen"] + rows["rejected"], "label": [True] * pairs + [False] * pairs}
    others = {key: values for key, values in rows.items() if key not in ("chosen", "rejected")}
    return {**{key: values + values for key, values in others.items()}, **result}


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """:func:`unpair_preference_dataset` for a dataset of pairs; any other as it is."""
    columns = dataset.column_names
    if isinstance(columns, Mapping):  # of a DatasetDict
        columns = next(iter(columns.values()))
    return unpair_preference_dataset(dataset, num_proc, desc) if {"chosen", "rejected"} <= {*columns} else dataset
