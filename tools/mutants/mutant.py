"""A mutant of the package. Nothing here needs the tools that make them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """A file with one change.

    Attributes:
        file: path in the repository.
        line: first line of the change.
        old: the lines that are changed, stripped.
        new: what they become.
        text: the whole file.
    """

    file: str
    line: int
    old: str
    new: str
    text: str

    @property
    def change(self) -> tuple[str, str, str]:
        """The mutant, wherever its line is now."""
        return self.file, self.old, self.new


def package_of(file: str) -> str:
    """The package of a file, such as ``engines``."""
    parts = Path(file).parts
    return parts[1] if len(parts) > 2 else parts[0]
