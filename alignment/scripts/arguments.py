"""Arguments of scripts that are not options of a trainer: a dataset, or a mixture of datasets."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from alignment.config.errors import OptionError, did_you_mean, setting
from alignment.config.fields import option


# transformers' HfArgumentParser can convert these annotations to arguments.
@dataclass
class ScriptArguments:
    """The dataset that a script loads, like TRL's class of this name.

    These arguments are read by the script, which loads the dataset, not by a trainer.

    Raises:
        OptionError: ``gradient_checkpointing_use_reentrant`` is set.
    """

    dataset_name: str | None = option(None, "Folder, file or Hub name of the dataset. Ignored if there is a mixture.")
    dataset_config: str | None = option(
        None, "Configuration of the dataset: the argument `name` of `datasets.load_dataset`."
    )
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on.")
    dataset_streaming: bool = option(False, "Stream the dataset.")
    gradient_checkpointing_use_reentrant: bool = option(
        False, "Deprecated and not supported; set `gradient_checkpointing_kwargs` instead."
    )
    ignore_bias_buffers: bool = option(
        False, "Has no effect: applies to DistributedDataParallel only, and DeepSpeed does not synchronize buffers."
    )

    def __post_init__(self) -> None:
        if self.gradient_checkpointing_use_reentrant:
            raise OptionError(
                "gradient_checkpointing_use_reentrant=True: not supported; set gradient_checkpointing_kwargs: "
                '{"use_reentrant": true} instead'
            )


@dataclass
class DatasetConfig:
    """One dataset of a mixture: arguments of ``datasets.load_dataset``, columns, and fraction."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """A mixture of datasets, like TRL's class of this name; :func:`get_dataset` loads it.

    Raises:
        OptionError: an entry is neither a :class:`DatasetConfig` nor a mapping of its fields.
    """

    datasets: list[DatasetConfig] = field(
        default_factory=list,
        metadata={"help": "Datasets of the mixture: a list of mappings, in the file passed as --config."},
    )
    streaming: bool = option(False, "Stream the datasets.")
    test_split_size: float | None = option(
        None, "Number or fraction of rows for evaluation: `test_size` of `Dataset.train_test_split`."
    )

    def __post_init__(self) -> None:
        self.datasets = [_dataset(index, each) for index, each in enumerate(self.datasets)]


def _dataset(index: int, given: Any) -> DatasetConfig:
    """Convert an entry of the list to a :class:`DatasetConfig`."""
    if isinstance(given, DatasetConfig):
        return given
    if not isinstance(given, dict):
        raise OptionError(f"{setting(f'datasets[{index}]', given)}: expected a mapping with path, name, split …")
    names = [each.name for each in dataclasses.fields(DatasetConfig)]
    for name, value in given.items():
        if name not in names:
            raise OptionError(
                f"{setting(f'datasets[{index}].{name}', value)}: unknown key; expected one of {', '.join(names)}"
                f"{did_you_mean(str(name), names)}"
            )
    if "path" not in given:
        raise OptionError(f"datasets[{index}]: path is missing; set it to a folder or Hub name")
    return DatasetConfig(**given)
