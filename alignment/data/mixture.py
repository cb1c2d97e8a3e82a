"""Mixtures: how many rows, and which, each of several datasets gives.

Every part is read, checked and tokenised by itself, so that its columns, its cache and the row numbers in messages are
its own; what is mixed are tokenised rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets

from alignment.config.errors import DataError
from alignment.data.prepare import Prepared
from alignment.data.report import DataReport


@dataclass(frozen=True)
class Part:
    """One dataset of a mixture.

    ``load`` gives a Dataset, or anything that a trainer takes as one. ``weight`` is relative to the other parts'; None
    for every row.
    """

    where: str
    load: Callable[[], Any]
    column_map: Mapping[str, str] | None = None
    weight: float | None = None


Mixture = tuple[Part, ...]


def shares(parts: Sequence[tuple[str, int, float | None]], most: int | None) -> list[int]:
    """How many rows each part gives.

    With weights: as many as there can be in these shares without a row twice, which the part that is used up first
    decides. Fractions of rows are given to the parts that are owed most (the earlier one of equals).

    Args:
        parts: name, rows and weight of each; the weight is None for all or for none of them. Without weights every
            row is given, or where ``most`` is fewer, shares by size.
        most: rows of the whole mixture at most.

    Raises:
        DataError: a part would give no row.
    """
    weights = [Fraction(str(rows if weight is None else weight)) for _, rows, weight in parts]  # by str, 0.7 is 7/10
    fractions = [weight / sum(weights) for weight in weights]
    total = min(int(rows / fraction) for (_, rows, _), fraction in zip(parts, fractions))
    total = total if most is None else min(total, most)
    owed = [total * fraction for fraction in fractions]
    given = [int(rows) for rows in owed]
    late = sorted(range(len(parts)), key=lambda i: given[i] - owed[i])[: total - sum(given)]
    given = [rows + (i in late) for i, rows in enumerate(given)]
    for (name, _, weight), rows in zip(parts, given):
        if not rows:
            raise DataError(
                f"{name}: its share of a mixture of {total} rows is none"
                f"{'' if weight is None else f' at weight {weight}'}; leave it out, or use more rows"
            )
    return given


def mixed(
    parts: Sequence[tuple[str, Prepared, float | None]], most: int | None, seed: int
) -> tuple[Dataset, list[DataReport]]:
    """The rows of a mixture, part after part, and the report of each part.

    Args:
        parts: name, tokenised rows and weight of each. A single one is taken whole.
        most: rows of the whole mixture at most.
        seed: decides which rows are drawn.

    Raises:
        DataError: a part would give no row.
    """
    if len(parts) == 1:
        return parts[0][1].dataset, [parts[0][1].report]
    counts = shares([(name, len(part.dataset), weight) for name, part, weight in parts], most)
    datasets, reports = [], []
    for number, ((_, part, _), count) in enumerate(zip(parts, counts)):
        dataset = part.dataset
        if count < len(dataset):
            dataset = dataset.select(draw(dataset.with_format("numpy")["row"][:], count, (seed, number)))
        desirable = int(dataset.with_format("numpy")["label"][:].sum()) if "label" in dataset.column_names else 0
        datasets.append(dataset)
        reports.append(part.report.drawn(count, desirable))
    return concatenate_datasets(datasets), reports


def draw(rows: np.ndarray, count: int, seed: Sequence[int]) -> np.ndarray:
    """Which ``count`` tokenised rows to take, in the order of the data: a function of the seed.

    Rows that come from one row of the data (the two of a pair, for KTO) are taken together; where the count asks for
    it, the last ones are not.

    Args:
        rows: (N,) the row of the data that each tokenised row comes from.
        count: at most N.
        seed: any number of integers.
    """
    _, source = np.unique(rows, return_inverse=True)
    places = np.random.default_rng(list(seed)).permutation(len(rows))[source]
    return np.sort(np.argsort(places, kind="stable")[:count])
