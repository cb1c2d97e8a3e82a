"""Select the tests of a checkout, and copy them so that they run without TRL."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_TRAINERS = ("kto", "cpo", "online_dpo", "reward")
_WITH_SFT = (0, 24)  # the first release whose SFT tests use the current interface
_LEAVES = ("conftest.py",)  # prepares TRL's own classes and machines


def release(checkout: Path) -> str:
    """Return the release of a checkout.

    Raises:
        ValueError: the folder is not a checkout of TRL.
    """
    file = checkout / "VERSION"
    text = file.read_text().strip() if file.exists() else ""
    source = checkout / "trl" / "__init__.py"
    if not text and source.exists():
        found = re.search(r'^__version__ = "(.+)"', source.read_text(), re.M)
        text = found.group(1) if found else ""
    if not text:
        raise ValueError(f"{checkout} is not a checkout of TRL: no VERSION or trl/__init__.py; pass a clone")
    return text


def files(checkout: Path) -> list[Path]:
    """Return the test files of the trainers that this package also has.

    Raises:
        ValueError: a file is missing.
    """
    found = [_test_file(checkout, name) for name in _TRAINERS]
    numbers = tuple(int(part) for part in release(checkout).split(".")[:2])
    # The SFT tests of 1.6 are a subset of those of the next release.
    if numbers == _WITH_SFT or "dev" in release(checkout):
        found.append(_test_file(checkout, "sft"))
    return found


def _test_file(checkout: Path, name: str) -> Path:
    for folder in ("tests", "tests/experimental"):
        file = checkout / folder / f"test_{name}_trainer.py"
        if file.exists():
            return file
    raise ValueError(f"{checkout}: no test_{name}_trainer.py in tests/ or tests/experimental/")


def copy(checkout: Path, folder: Path) -> list[Path]:
    """Copy the test files and the modules that they import from their package.

    Args:
        checkout: a checkout of TRL.
        folder: the target folder, which becomes a package with a package ``tests`` in it.

    Returns:
        The copies of :func:`files`.
    """
    (folder / "tests" / "experimental").mkdir(parents=True)
    for package in (folder, folder / "tests", folder / "tests" / "experimental"):
        (package / "__init__.py").touch()
    for file in (checkout / "tests").glob("testing_*.py"):
        shutil.copyfile(file, folder / "tests" / file.name)
    if (checkout / "tests" / "data").exists():
        shutil.copytree(checkout / "tests" / "data", folder / "tests" / "data")
    copies = []
    for file in files(checkout):
        copies.append(folder / file.relative_to(checkout))
        shutil.copyfile(file, copies[-1])
    return copies
