"""datasets: splits and their slices, saved datasets, the cache folder, and causes of errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def data_files_by_split(folder: str) -> Mapping[object, Iterable[str]]:
    """Map splits to the paths of a folder's data files, by the naming rules of ``load_dataset``.

    ``load_dataset`` would also read the files, which exact readers do here. Seen with datasets 5.2.

    Raises:
        FileNotFoundError: no file name follows the rules.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    return DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder)


def was_saved(folder: Path) -> bool:
    """Whether ``folder`` was written by ``save_to_disk``, from a ``Dataset`` or a ``DatasetDict``.

    ``load_from_disk`` raises the same error for other folders and for damaged ones. It looks for these two files,
    whose names are not documented. Seen with datasets 5.2.
    """
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def slices(split: str, rows: Mapping[str, int]) -> list[tuple[str, range]]:
    """The parts of a split such as ``train[:10%]+test``: pairs of a split and its row numbers, in their order.

    ``ReadInstruction`` is public, but not the result of ``to_absolute``. Seen with datasets 5.2.

    Args:
        split: a split in the syntax of ``load_dataset``.
        rows: number of rows of every split.

    Raises:
        ValueError, AssertionError: the syntax is invalid, or the rows are beyond a split.
    """
    from datasets import ReadInstruction

    pieces = ReadInstruction.from_spec(split).to_absolute(dict(rows))
    return [(piece.splitname, range(piece.from_, piece.to)) for piece in pieces]


def cause_of(error: Exception) -> BaseException | None:
    """The error of a user's generator, if ``error`` is the wrapper that ``Dataset.from_generator`` raises.

    The class is not exported. Seen with datasets 5.2.
    """
    from datasets.exceptions import DatasetGenerationError

    return error.__cause__ if isinstance(error, DatasetGenerationError) else None


def cache_folder() -> Path:
    """The cache folder: ``HF_DATASETS_CACHE``, or the one derived from ``HF_HOME``.

    Only the variables are documented; the library reads them once, on import. Seen with datasets 5.2.
    """
    from datasets import config

    return Path(config.HF_DATASETS_CACHE)
