"""List installed versions that differ from the tested ones: ``python -m tools.versions``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"


def pinned(file: Path = CONSTRAINTS) -> list[Requirement]:
    """Return the pinned versions for this Python."""
    lines = (line.partition(" #")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return [one for one in found if one.marker is None or one.marker.evaluate()]


def differences(file: Path = CONSTRAINTS) -> Iterator[tuple[str, str, str]]:
    """Return package, tested version and installed version; packages that are not installed are omitted."""
    for requirement in pinned(file):
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield requirement.name, str(requirement.specifier).removeprefix("=="), found


def main() -> None:
    """Print the differences."""
    found = list(differences())
    for name, tested, installed in found:
        print(f"{name}: tested with {tested}, installed {installed}")
    if not found:
        print("all installed versions are the tested ones")


if __name__ == "__main__":
    main()
