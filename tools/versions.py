"""List installed versions that differ from the tested ones: ``python -m tools.versions``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


def pinned() -> Iterator[Requirement]:
    """Yield the pinned versions for this Python."""
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if text and ((one := Requirement(text)).marker is None or one.marker.evaluate()):
            yield one


def main() -> None:
    """Print the differences; packages that are not installed are omitted."""
    installed = {canonicalize_name(one.name): one.version for one in distributions()}
    for one in pinned():
        found = installed.get(canonicalize_name(one.name))
        if found and not one.specifier.contains(found, prereleases=True):
            print(f"{one}: installed {found}")


if __name__ == "__main__":
    main()
