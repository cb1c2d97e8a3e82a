"""The table ``tests/renames.yaml``: the private names used in ``alignment/internals/``, and their contract tests."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.ranks.client import ROOT

TABLE = ROOT / "tests" / "renames.yaml"
INTERNALS = ROOT / "alignment" / "internals"
_REQUIRED, _OPTIONAL = {"library", "name", "test"}, {"becomes"}


@dataclass(frozen=True)
class Rename:
    """One entry of the table.

    Attributes:
        function: a function of ``alignment/internals/``, as ``module.function``.
        library: the package whose copy is modified.
        name: the identifier or text that is replaced, as a whole word, in all of its ``.py`` files.
        becomes: the replacement; default: ``…_moved_away``.
        test: arguments of pytest.
    """

    function: str
    library: str
    name: str
    becomes: str
    test: str

    def __str__(self) -> str:
        return f"{self.function}: {self.library}'s {self.name}"


def load(file: Path = TABLE) -> list[Rename]:
    """Load all entries, in the order of the file.

    Raises:
        ValueError: an entry has missing or unknown keys.
    """
    found = []
    for function, entries in yaml.safe_load(file.read_text(encoding="utf-8")).items():
        found += [_rename(function, entry) for entry in entries]
    return found


def _rename(function: str, entry: dict[str, Any]) -> Rename:
    if not _REQUIRED <= set(entry) <= _REQUIRED | _OPTIONAL or not all(isinstance(v, str) for v in entry.values()):
        raise ValueError(
            f"{function}: {entry}: expected the keys library, name, test and, optionally, becomes, with string values"
        )
    return Rename(function, **{"becomes": moved_away(entry["name"]), **entry})


def moved_away(name: str) -> str:
    """Return an unused name.

    ``_moved_away`` follows the first word, so that the result does not contain the old name.
    """
    return re.sub(r"\w+", r"\g<0>_moved_away", name, count=1)


def functions() -> set[str]:
    """Return the public functions of ``alignment/internals/``, as ``module.function``."""
    return {
        f"{file.stem}.{node.name}"
        for file in INTERNALS.glob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
