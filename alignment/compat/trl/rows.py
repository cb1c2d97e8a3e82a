"""Functions with which scripts convert pairs, as TRL documents them: its own cut words, and drop one of two answers.

The trainers do not need them: they read every format as it is (``docs/guides/data.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alignment.config.errors import DataError


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
    if "prompt" in example and isinstance(example["prompt"], str) == isinstance(example["chosen"], str):
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
    return {**{key: rows[key] * 2 for key in rows if key not in ("chosen", "rejected")}, **result}


def maybe_unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Apply :func:`unpair_preference_dataset` to a dataset of pairs; return any other dataset unchanged."""
    columns = dataset.column_names
    if isinstance(columns, Mapping):  # a DatasetDict
        columns = next(iter(columns.values()))
    return unpair_preference_dataset(dataset, num_proc, desc) if {"chosen", "rejected"} <= {*columns} else dataset
