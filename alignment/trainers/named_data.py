"""The datasets that options name; loaded, when called, by the one process of a machine that tokenises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from alignment.config.mixture import mixture_parts, tested_parts
from alignment.config.options import AlignmentConfig
from alignment.data.mixture import Mixture, Part
from alignment.data.sources import load_split


@dataclass(frozen=True)
class NamedSplit:
    """A split of a dataset. ``where`` is its name in messages."""

    where: str
    name: str
    config: str | None
    split: str

    def __call__(self) -> Dataset:
        return load_split(self.name, self.config, self.split)


@dataclass(frozen=True)
class NamedMixture:
    """Several datasets that become one. ``where`` is its name in messages."""

    where: str
    parts: Mixture

    def __call__(self) -> Mixture:
        return self.parts


Named = Callable[[], Any]


def training_data(options: AlignmentConfig) -> Named:
    """What ``dataset_name`` or ``dataset_mixture`` names to train on."""
    if options.dataset_mixture is None:
        return _split(options, options.dataset_train_split)
    parts = []
    for part in mixture_parts(options.dataset_mixture):
        load = _named(part.dataset_name, part.dataset_config, part.split, options.dataset_train_split)
        parts.append(Part(load.where, load, part.column_map, part.weight))
    return NamedMixture("dataset_mixture", tuple(parts))


def evaluation_data(options: AlignmentConfig) -> Named | None:
    """What is named to evaluate on, if anything: of a mixture, every row of the parts that have a split for it."""
    if options.dataset_mixture is None:
        return None if options.dataset_test_split is None else _split(options, options.dataset_test_split)
    parts = []
    for part, split in tested_parts(options):
        load = _named(part.dataset_name, part.dataset_config, split, options.dataset_train_split)
        parts.append(Part(load.where, load, part.column_map))
    return NamedMixture("dataset_mixture (evaluation)", tuple(parts)) if parts else None


def _split(options: AlignmentConfig, split: str) -> NamedSplit:
    assert options.dataset_name is not None
    return _named(options.dataset_name, options.dataset_config, split, options.dataset_train_split)


def _named(name: str, config: str | None, split: str | None, usual: str) -> NamedSplit:
    """A split by its name; messages name the split only where it is not the ``usual`` one."""
    split = split or usual
    return NamedSplit(name if split == usual else f"{name} ({split})", name, config, split)
