"""Copy an installed library with one name replaced, using symbolic links for unchanged files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def renamed_copy(library: str, name: str, becomes: str, folder: Path) -> int:
    """Create a modified copy of ``library`` in ``folder``, to be added to ``PYTHONPATH``.

    The library itself still works, because the name is replaced everywhere, including strings. Compiled files and all
    other files that do not contain the name are symbolic links. Disable writing of bytecode, because folders of cached
    bytecode are links as well.

    Returns:
        The number of files that contain the name.

    Raises:
        ModuleNotFoundError: the library is not installed.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{library} is not an installed package")
    source = Path(spec.submodule_search_locations[0])
    texts = {
        file: text for file in source.rglob("*.py") if (text := _renamed(file.read_bytes(), name, becomes)) is not None
    }
    _link(source, folder / library, texts, {parent for file in texts for parent in file.parents})
    return len(texts)


def _renamed(text: bytes, name: str, becomes: str) -> bytes | None:
    """Replace every occurrence of ``name`` as a whole word; return None if there is none."""
    if name.encode() not in text:
        return None
    # Require a word boundary only if the name starts or ends with a word character.
    pattern = r"(?<!\w)" * bool(re.match(r"\w", name)) + re.escape(name) + r"(?!\w)" * bool(re.search(r"\w$", name))
    changed, count = re.subn(pattern.encode(), lambda _: becomes.encode(), text)
    return changed if count else None


def _link(source: Path, target: Path, texts: dict[Path, bytes], opened: set[Path]) -> None:
    """Create ``target`` as a folder if a file below ``source`` is changed, otherwise as a link."""
    if source in texts:
        target.write_bytes(texts[source])
    elif source in opened:
        target.mkdir(parents=True)
        for entry in source.iterdir():
            _link(entry, target / entry.name, texts, opened)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
