"""From rows to a planned, tokenised dataset on every rank; local rank 0 does the work, the others read its cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.data.batching import row_table
from alignment.data.prepare import load_prepared, prepare
from alignment.data.report import DataReport
from alignment.data.sources import dataset_from_python, take
from alignment.data.truncation import Limits
from alignment.data.windows import RowTable
from alignment.engines.collectives import barrier, from_first_rank
from alignment.engines.launch_env import local_rank
from alignment.trainers.method import Method


@dataclass(frozen=True)
class PreparedData:
    """A tokenised dataset, what planning needs of it, and what became of the source rows."""

    where: str
    dataset: Dataset
    table: RowTable
    report: DataReport

    def source_row(self, row: int) -> int:
        """The 1-based number in the user's data of a tokenised row."""
        return int(self.dataset[row]["row"]) + 1


def limits_of(options: AlignmentConfig) -> Limits:
    """The lengths that rows are cut to."""
    assert isinstance(options, SequenceOptions)
    return Limits(
        max_length=options.max_length,
        max_prompt_length=options.max_prompt_length,
        max_completion_length=options.max_completion_length,
        truncation_mode=options.truncation_mode,
    )


def order_seed(options: AlignmentConfig) -> int:
    """The seed of the order of the rows and of their partners."""
    return options.seed if options.data_seed is None else options.data_seed


def prepare_data(
    load: Callable[[], Any], limit: int | None, method: Method, tokenizer: Any, options: AlignmentConfig, where: str
) -> PreparedData:
    """Tokenise a dataset on local rank 0, or find it in the cache; read it on every rank.

    Args:
        load: gives a Dataset or a list of rows; called on local rank 0 only.
        limit: use only the first so many rows.
        method: decides the kind of rows.
        tokenizer: the policy's.
        options: lengths, processes, strictness.
        where: name of the data in messages.

    Raises:
        DataError: naming file, row, key and value.
    """
    limits, path = limits_of(options), None
    if local_rank() == 0:
        path = prepare(
            take(dataset_from_python(load()), limit),
            method.kind,
            tokenizer,
            limits,
            where,
            Path(datasets.config.HF_DATASETS_CACHE) / "deepspeed-alignment",
            num_proc=options.dataset_num_proc,
            strict=options.strict_data,
            progress=not options.disable_tqdm,
        )
    # The folder's name is a hash of content: the first rank's is right for every machine.
    path = from_first_rank(path)
    barrier()
    prepared = load_prepared(path)
    table = row_table(prepared.dataset, method.completions, limits.max_length)
    return PreparedData(where, prepared.dataset, table, prepared.report)
