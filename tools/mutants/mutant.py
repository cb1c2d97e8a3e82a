"""A mutant of the package. This module does not depend on the tools that create mutants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A file with one change.

    Attributes:
        file: path in the repository.
        line: first line of the change.
        old: the changed lines, stripped.
        new: their replacement.
        text: the complete mutated file.
    """

    file: str
    line: int
    old: str
    new: str
    text: str

    @property
    def change(self) -> tuple[str, str, str]:
        """The mutant, independent of its current line number."""
        return self.file, self.old, self.new


def package_of(file: str) -> str:
    """Return the package of a file, such as ``engines``."""
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else parts[0]
