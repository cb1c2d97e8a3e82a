"""The option `dataset_mixture`: several datasets, each with its own split, columns and weight."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from alignment.config.columns import check_column_map
from alignment.config.conversion import convert, hints
from alignment.config.errors import OptionError
from alignment.config.refusals import nearest, shown


@dataclass(frozen=True, kw_only=True)
class MixturePart:
    """One dataset of a mixture; what is unset is taken from the options of the same name.

    ``weight`` is the part's share of the mixture's rows, relative to the other weights; None for all of its rows.
    """

    dataset_name: str
    dataset_config: str | None = None
    split: str | None = None
    test_split: str | None = None
    weight: float | None = None
    column_map: dict[str, str] | None = None


_KEYS = tuple(field.name for field in dataclasses.fields(MixturePart))


def mixture_parts(value: list[Any] | dict[str, Any]) -> list[MixturePart]:
    """The parts of ``dataset_mixture``: a list of names or mappings, or a mapping from name to weight.

    Raises:
        OptionError: a part without a name, an unknown key, a wrong value, or weights for some parts only.
    """
    if isinstance(value, dict):
        value = [{"dataset_name": name, "weight": weight} for name, weight in value.items()]
    parts = [_part(f"dataset_mixture[{number}]", item) for number, item in enumerate(value)]
    if not parts:
        raise OptionError("dataset_mixture: it is empty; name at least one dataset")
    unweighted = [part.dataset_name for part in parts if part.weight is None]
    if unweighted and len(unweighted) < len(parts):
        raise OptionError(
            f"dataset_mixture: {unweighted[0]} has no weight, but others have one; give every part a weight, or none"
        )
    return parts


def tested_parts(options: Any) -> list[tuple[MixturePart, str]]:
    """The parts of the mixture to evaluate on, each with its split: its own, or that of the options."""
    parts = mixture_parts(options.dataset_mixture) if options.dataset_mixture is not None else []
    splits = [(part, part.test_split or options.dataset_test_split) for part in parts]
    return [(part, split) for part, split in splits if split]


def check_mixture(options: Any) -> None:
    """Check ``dataset_mixture`` and ``column_map``, and that nothing beside them would be ignored."""
    check_column_map("column_map", options.column_map)
    if options.dataset_mixture is None:
        return
    mixture_parts(options.dataset_mixture)
    for name in ("dataset_name", "dataset_config"):
        if getattr(options, name) is not None:
            raise OptionError(
                f"{shown(name, getattr(options, name))}: dataset_mixture is set as well; "
                f"leave one out, or make it a part: {{dataset_name: …}}"
            )


def _part(where: str, item: Any) -> MixturePart:
    given = {"dataset_name": item} if isinstance(item, str) else item
    if not isinstance(given, dict):
        raise OptionError(f"{shown(where, item)}: give a name, or a mapping with keys among {', '.join(_KEYS)}")
    for key in given:
        if key not in _KEYS:
            raise OptionError(f"{where}.{shown(str(key), given[key])}: no such key{_hint(str(key))}")
    if not given.get("dataset_name"):
        raise OptionError(f"{where}: has no dataset_name; set it to a file, a folder or a hub name")
    declared = hints(MixturePart)
    values = {key: convert(f"{where}.{key}", value, declared[key]) for key, value in given.items()}
    part = MixturePart(**values)
    if part.weight is not None and not (part.weight > 0 and math.isfinite(part.weight)):
        raise OptionError(
            f"{where}.{shown('weight', part.weight)}: must be greater than 0; set a positive number, or leave the "
            "part out"
        )
    check_column_map(f"{where}.column_map", part.column_map)
    return part


def _hint(key: str) -> str:
    return nearest(key, _KEYS) or f"; set keys among {', '.join(_KEYS)}"
