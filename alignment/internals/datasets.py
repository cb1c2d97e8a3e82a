"""datasets: which files of a folder belong to which split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def data_files_by_split(folder: str) -> Mapping[object, Iterable[str]]:
    """Split -> paths of a folder's data files, by the naming rules of ``load_dataset``.

    ``load_dataset`` itself would read the files, which is left to exact readers here. Seen with datasets 5.2.

    Raises:
        FileNotFoundError: no file whose name follows the rules.
    """
    from datasets.data_files import DataFilesDict, get_data_patterns

    return DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder)
