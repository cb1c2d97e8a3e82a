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


def unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Convert a dataset (or splits) of pairs to rows with ``completion`` and ``label``.

    In each batch of 1000 rows, the chosen completions come before the rejected ones.
    """

    def unpaired(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        chosen, rejected = rows["chosen"], rows["rejected"]
        others = {name: values * 2 for name, values in rows.items() if name not in ("chosen", "rejected")}
        labels = [True] * len(chosen) + [False] * len(rejected)
        return {**others, "completion": chosen + rejected, "label": labels}

    return dataset.map(unpaired, batched=True, remove_columns=["chosen", "rejected"], num_proc=num_proc, desc=desc)
