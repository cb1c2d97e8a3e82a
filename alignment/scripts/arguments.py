"""The arguments of a script that are no options of a trainer: which dataset, and which mixture of datasets."""

# ruff: noqa: RUF009 - option() is dataclasses.field() with a help text

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from alignment.config.errors import OptionError, did_you_mean, setting
from alignment.config.fields import option


# The annotations are those that transformers' HfArgumentParser can turn into arguments.
@dataclass
class ScriptArguments:
    """Which dataset a script loads, as TRL's class of this name.

    The script itself loads it: these are read by the script, not by a trainer.

    Raises:
        OptionError: ``gradient_checkpointing_use_reentrant`` is set.
    """

    dataset_name: str | None = option(None, "Folder, file or hub name of the dataset; a mixture goes first.")
    dataset_config: str | None = option(None, "Configuration of the dataset: `name` of `datasets.load_dataset`.")
    dataset_train_split: str = option("train", "Split to train on.")
    dataset_test_split: str = option("test", "Split to evaluate on.")
    dataset_streaming: bool = option(False, "Stream the dataset.")
    gradient_checkpointing_use_reentrant: bool = option(
        False, "Older name, which nothing reads; set `gradient_checkpointing_kwargs`."
    )
    ignore_bias_buffers: bool = option(
        False, "For DistributedDataParallel, which is not used here: DeepSpeed sends no buffers, whatever this says."
    )

    def __post_init__(self) -> None:
        if self.gradient_checkpointing_use_reentrant:
            raise OptionError(
                "gradient_checkpointing_use_reentrant=True: nothing reads it; set gradient_checkpointing_kwargs: "
                '{"use_reentrant": true}'
            )


@dataclass
class DatasetConfig:
    """One dataset of a mixture: arguments of ``datasets.load_dataset``, and what is taken of it."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclass
class DatasetMixtureConfig:
    """Datasets that are put behind one another, as TRL's class of this name; :func:`get_dataset` loads them.

    Raises:
        OptionError: an entry that is neither a :class:`DatasetConfig` nor a mapping of its fields.
    """

    datasets: list[DatasetConfig] = field(
        default_factory=list,
        metadata={"help": "Datasets of the mixture, in the file that --config names: a list of mappings."},
    )
    streaming: bool = option(False, "Stream the datasets.")
    test_split_size: float | None = option(
        None, "Rows, or their share, that are split off for evaluation: `test_size` of `Dataset.train_test_split`."
    )

    def __post_init__(self) -> None:
        self.datasets = [_dataset(index, each) for index, each in enumerate(self.datasets)]


def _dataset(index: int, given: Any) -> DatasetConfig:
    """An entry of the list as what it means."""
    if isinstance(given, DatasetConfig):
        return given
    if not isinstance(given, dict):
        raise OptionError(f"{setting(f'datasets[{index}]', given)}: expected a mapping with path, name, split …")
    names = [each.name for each in dataclasses.fields(DatasetConfig)]
    for name, value in given.items():
        if name not in names:
            raise OptionError(
                f"{setting(f'datasets[{index}].{name}', value)}: not a key of a dataset (they are {', '.join(names)})"
                f"{did_you_mean(str(name), names) or '; remove it'}"
            )
    if "path" not in given:
        raise OptionError(f"datasets[{index}]: path is missing; set it to a folder or hub name")
    return DatasetConfig(**given)
