"""The table of ``make renames`` has every function of ``alignment/internals/`` and names existing tests."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

from conftest import DRIVERS, ROOT

from tools.renames import load, renamed_copy

OF_PYTHON = ("before_threads_end", "leave_daemon_pools")  # use Python itself, which is not copied


def functions() -> set[str]:
    """Return the public functions of ``alignment/internals/``, as ``module.function``."""
    return {
        f"{file.stem}.{node.name}"
        for file in (ROOT / "alignment" / "internals").glob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in OF_PYTHON
    }


def test_the_table() -> None:
    assert {rename.function for rename in load()} == functions()
    for rename in load():
        chosen, *options = shlex.split(rename.test)
        file, _, name = chosen.partition("::")
        text = (ROOT / file).read_text()
        run = text + "".join(driver.read_text() for driver in DRIVERS.glob("*.py") if driver.name in text)
        assert rename.function.rpartition(".")[2] in run, f"{rename}: the test calls the function"
        assert not name or f"def {name.partition('[')[0]}(" in text, rename
        words = [word for word in " ".join(options[1:]).split() if word not in ("and", "or", "not")]
        assert not words or any(word in text for word in words), rename


def test_a_renamed_library(tmp_path: Path) -> None:
    rename = next(rename for rename in load() if rename.library == "tqdm")
    assert renamed_copy(rename, tmp_path) > 0
    changed = [file for file in (tmp_path / "tqdm").rglob("*.py") if not file.is_symlink()]
    assert changed and all(rename.replacement in file.read_text() for file in changed)
