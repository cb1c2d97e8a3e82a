"""Load the mixture of datasets that a script's arguments describe."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

from alignment.config.errors import OptionError, setting
from alignment.scripts.arguments import DatasetMixtureConfig

if TYPE_CHECKING:
    from datasets import DatasetDict


def get_dataset(mixture_config: DatasetMixtureConfig) -> DatasetDict:
    """Load the datasets of a mixture and concatenate their rows.

    If every dataset has a ``fraction``, the rows are mixed in these proportions: the first rows of each dataset, as
    many as possible without repetition.

    Returns:
        The split ``train`` and, with ``test_split_size``, a random split ``test``.

    Raises:
        OptionError: there are no datasets, or invalid fractions.
    """
    from datasets import Dataset, DatasetDict, IterableDatasetDict, concatenate_datasets, load_dataset

    config = mixture_config
    if not config.datasets:
        raise OptionError("datasets=[]: no datasets; list them under datasets in the file passed as --config")
    _check_fractions(config)
    parts: list[Any] = []
    for each in config.datasets:
        part = load_dataset(
            each.path,
            each.name,
            data_dir=each.data_dir,
            data_files=each.data_files,
            split=each.split,
            streaming=config.streaming,
        )
        parts.append(part if each.columns is None else part.select_columns(each.columns))
    rows = concatenate_datasets(_in_shares(config, parts))
    if config.test_split_size is None:
        return DatasetDict({"train": rows}) if isinstance(rows, Dataset) else IterableDatasetDict({"train": rows})
    return rows.train_test_split(test_size=config.test_split_size)


def _check_fractions(config: DatasetMixtureConfig) -> None:
    """Reject fractions that would not have the intended effect."""
    given = [each.fraction for each in config.datasets]
    if config.streaming and config.test_split_size is not None:
        raise OptionError(
            f"{setting('test_split_size', config.test_split_size)}: not supported with streaming, as the number of "
            "rows is unknown; set streaming: false, or use a split for evaluation"
        )
    if all(fraction is None for fraction in given):
        return
    for index, fraction in enumerate(given):
        name = f"datasets[{index}].fraction"
        if fraction is None:
            raise OptionError(f"{name} is not set, but other datasets have one; set it for every dataset or for none")
        if not fraction > 0:
            raise OptionError(f"{setting(name, fraction)}: must be greater than 0; remove the dataset instead")
    if config.streaming:
        raise OptionError(
            "datasets[0].fraction: not supported with streaming, as the number of rows is unknown; set "
            "streaming: false"
        )


def _in_shares(config: DatasetMixtureConfig, parts: list[Any]) -> list[Any]:
    """Select the first rows of each part in the proportions of the mixture."""
    if config.datasets[0].fraction is None:
        return parts
    weights = [Fraction(str(each.fraction)) for each in config.datasets]  # via str, so that 0.7 is 7/10
    shares = [weight / sum(weights) for weight in weights]
    total = min(len(part) / share for part, share in zip(parts, shares))
    return [part.select(range(min(len(part), round(total * share)))) for part, share in zip(parts, shares)]
