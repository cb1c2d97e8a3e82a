"""datasets: splits and their slices, saved datasets, the cache folder, and what is behind an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def data_files_by_split(folder: str) -> Mapping[object, Iterable[str]]:
    """Split -> paths of a folder's data files, by the naming rules of ``load_dataset``.

    ``load_dataset`` itself would read the files, which is left to exact readers here. Seen with datasets 5.2.

    Raises:
        FileNotFoundError: no file whose name follows the rules.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    return DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder)


def was_saved(folder: Path) -> bool:
    """Whether ``folder`` was written by ``save_to_disk``: a ``Dataset``, or a ``DatasetDict``.

    ``load_from_disk`` raises the same error for a folder that was not and for one that is damaged. It looks for these
    two files, whose names are not documented. Seen with datasets 5.2.
    """
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def slices(split: str, rows: Mapping[str, int]) -> list[tuple[str, range]]:
    """The parts that ``split``, such as ``train[:10%]+test``, names: a split and its row numbers each, in their order.

    ``ReadInstruction`` is public; what ``to_absolute`` returns is not. Seen with datasets 5.2.

    Args:
        split: in the syntax of ``load_dataset``.
        rows: number of rows of every split.

    Raises:
        ValueError, AssertionError: not in that syntax, or beyond a split.
    """
    from datasets import ReadInstruction

    pieces = ReadInstruction.from_spec(split).to_absolute(dict(rows))
    return [(piece.splitname, range(piece.from_, piece.to)) for piece in pieces]


def cause_of(error: Exception) -> BaseException | None:
    """What a user's generator raised, if ``error`` is the one that ``Dataset.from_generator`` puts around it.

    The class is not exported. Seen with datasets 5.2.
    """
    from datasets.exceptions import DatasetGenerationError

    return error.__cause__ if isinstance(error, DatasetGenerationError) else None


def cache_folder() -> Path:
    """The folder of the cache: ``HF_DATASETS_CACHE``, or what ``HF_HOME`` makes of it.

    Only the variables are documented; the library reads them once, as it is imported. Seen with datasets 5.2.
    """
    from datasets import config

    return Path(config.HF_DATASETS_CACHE)
