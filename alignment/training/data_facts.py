"""What is known about prepared data: counts of rows and percentiles of lengths, for the dry run, log and report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from alignment.training.data import PreparedData

PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}


def token_lengths(data: PreparedData, completions: Sequence[str]) -> dict[str, dict[str, int]]:
    """Percentiles of the numbers of tokens, by what is counted.

    Args:
        data: the tokenized rows.
        completions: the method's columns of completions.
    """
    prompt, counts = data.table.prompt, data.table.completions
    lengths = {"prompt": prompt}
    lengths |= {shown_name(name): counts[:, i] for i, name in enumerate(completions)}
    if completions:
        lengths["prompt and completion"] = (prompt[:, None] + counts).ravel()
    if data.packs is not None:
        lengths = {"pack": data.packs.tokens, "trained on per pack": counts[:, 0]}
        lengths["sequence"] = data.packs.stops - data.packs.begins
    found = {}
    for name, values in lengths.items():
        points = np.percentile(values, list(PERCENTILES.values()), method="higher").tolist()
        found[name] = {key: int(point) for key, point in zip(PERCENTILES, points)}
    return found


def data_facts(role: str, data: PreparedData, completions: Sequence[str]) -> dict[str, Any]:
    """The facts about a dataset as the log has them: counts other than 0, and lengths.

    Args:
        role: what the data is for: ``training`` or ``evaluation``, with the name of the set.
        data: the tokenized rows.
        completions: the method's columns of completions.
    """
    counts = {name: count for name, count in asdict(data.report).items() if count}
    return {"role": role, "where": data.where, **counts, "lengths": token_lengths(data, completions)}


def shown_name(column: str) -> str:
    """A column of token ids as users know it."""
    return column.removesuffix("_ids")
