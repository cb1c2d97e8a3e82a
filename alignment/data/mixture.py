"""Mix several datasets: compute how many rows each contributes, and select them.

Each dataset is read, validated and tokenized separately, so that it has its own columns, its own cache and its own row
numbers in messages. Only tokenized rows are mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets

from alignment.config.errors import DataError
from alignment.data.prepare import Prepared
from alignment.data.report import NOT_DRAWN, DataReport, counts


@dataclass(frozen=True)
class Part:
    """A dataset by its name in messages, or one of a mixture.

    Attributes:
        where: its name in messages.
        load: returns a Dataset, or anything else that a trainer accepts as one, or a tuple of parts: a mixture.
        column_map: its column map.
        weight: its weight relative to the other datasets'; None to use all rows.
        label_map: its label map.
    """

    where: str
    load: Callable[[], Any]
    column_map: Mapping[str, str] | None = None
    weight: float | None = None
    label_map: Mapping[str, bool] | None = None


def shares(parts: Sequence[tuple[str, int, float | None]], most: int | None) -> list[int]:
    """Compute the number of rows that each dataset contributes.

    With weights, the mixture is as large as possible without using a row twice, so the dataset that is exhausted first
    determines its size. Fractional rows go to the datasets with the largest remainders, earlier datasets first.

    Args:
        parts: name, number of rows and weight of each dataset. Weights are None for all of them or for none. Without
            weights all rows are used; if ``most`` is smaller, shares are proportional to size.
        most: maximum number of rows of the mixture.

    Raises:
        DataError: a dataset would contribute no rows.
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
                f"{name}: it contributes no rows to a mixture of {total} rows"
                f"{'' if weight is None else f' at weight {weight}'}; remove it, or use more rows"
            )
    return given


def mixed(
    parts: Sequence[tuple[str, Prepared, float | None]], most: int | None, seed: int
) -> tuple[Dataset, list[DataReport]]:
    """Return the rows of a mixture, dataset by dataset, and the report of each dataset.

    ``parts`` are name, tokenized rows and weight of each dataset, and ``most`` is the maximum number of rows.

    Raises:
        DataError: a dataset would contribute no rows.
    """
    used = shares([(name, len(part.dataset), weight) for name, part, weight in parts], most)
    datasets, reports = [], []
    for number, ((_, part, _), count) in enumerate(zip(parts, used)):
        dataset, report = part.dataset, part.report
        if count < len(dataset):
            dropped = {**report.dropped, NOT_DRAWN: len(dataset) - count}
            dataset = dataset.select(draw(dataset.with_format("numpy")["row"][:], count, (seed, number)))
            report = replace(report, dropped=dropped, **counts(dataset))
        datasets.append(dataset)
        reports.append(report)
    return concatenate_datasets(datasets), reports


def draw(rows: np.ndarray, count: int, seed: Sequence[int]) -> np.ndarray:
    """Sample ``count`` tokenized rows and return their indices in the order of the data, as a function of the seed.

    ``rows`` (N,) has the source row of each: those of one source row (the two rows of a pair, for KTO) are sampled
    together, except possibly the last ones.
    """
    _, source = np.unique(rows, return_inverse=True)
    places = np.random.default_rng(list(seed)).permutation(len(rows))[source]
    return np.sort(np.argsort(places, kind="stable")[:count])
