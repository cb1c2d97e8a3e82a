"""A copy of an installed library in which one name has another spelling: symbolic links around the changed files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path


def renamed_copy(library: str, name: str, becomes: str, folder: Path) -> int:
    """Put a copy of ``library`` into ``folder``, which then belongs on ``PYTHONPATH``.

    The library itself goes on working, because the name changes everywhere in it, in strings too. Compiled files and
    everything else that does not contain the name are symbolic links. Do not let Python write bytecode: folders of
    cached bytecode are links as well.

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
    """The text with every whole occurrence of ``name`` replaced; None if there is none."""
    if name.encode() not in text:
        return None
    # A word boundary where the name begins or ends with a letter, and nothing where it is another text.
    pattern = r"(?<!\w)" * bool(re.match(r"\w", name)) + re.escape(name) + r"(?!\w)" * bool(re.search(r"\w$", name))
    changed, count = re.subn(pattern.encode(), lambda _: becomes.encode(), text)
    return changed if count else None


def _link(source: Path, target: Path, texts: dict[Path, bytes], opened: set[Path]) -> None:
    """``target`` is a folder if something below ``source`` is changed, and a link otherwise."""
    if source in texts:
        target.write_bytes(texts[source])
    elif source in opened:
        target.mkdir(parents=True)
        for entry in source.iterdir():
            _link(entry, target / entry.name, texts, opened)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
