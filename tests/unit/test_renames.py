"""The table of ``make renames`` is complete and names existing tests; copies of libraries work."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DRIVERS, ROOT

from tools.renames.copies import renamed_copy
from tools.renames.table import Rename, functions, load, moved_away


def test_every_function_is_in_the_table() -> None:
    found = [rename.function for rename in load()]
    assert set(found) == functions() and len(functions()) > 40


@pytest.mark.parametrize("rename", load(), ids=str)
def test_an_entry_names_a_test_and_changes_the_name(rename: Rename) -> None:
    chosen, *options = shlex.split(rename.test)
    file, _, name = chosen.partition("::")
    assert options[0] == "-k" if options else True
    text = (ROOT / file).read_text()
    run = text + "".join(driver.read_text() for driver in DRIVERS.glob("*.py") if driver.name in text)
    assert rename.function.rpartition(".")[2] in run, "the test calls the function"
    assert f"def {name.partition('[')[0]}(" in text or not name
    words = [word for word in " ".join(options[1:]).split() if word not in ("and", "or", "not")]
    assert not words or any(
        word in line for word in words for line in text.splitlines() if line.startswith("def test_")
    )
    assert not re.search(rf"(?<!\w){re.escape(rename.name)}(?!\w)", rename.becomes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_instances", "_instances_moved_away"),
        ("dataset_dict.json", "dataset_dict_moved_away.json"),
        ("`torch.x` is deprecated", "`torch_moved_away.x` is deprecated"),
    ],
)
def test_replacement_names(name: str, expected: str) -> None:
    assert moved_away(name) == expected


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a private function that two of its modules use."""
    package = tmp_path / "installed" / "a_library"
    (package / "deep" / "deeper").mkdir(parents=True)
    (package / "plain").mkdir()
    (package / "__init__.py").write_text("def _private():\n    return 'of the library'\n")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "deeper" / "__init__.py").write_text(
        "import a_library\nfound = getattr(a_library, '_private')()\nnot_private, _privately = 1, 2\n"
    )
    (package / "plain" / "__init__.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    return "a_library"


def test_a_renamed_library_works(library: str, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in (tmp_path / "installed").rglob("*.py")}
    assert renamed_copy(library, "_private", "_elsewhere", tmp_path / "copy") == 2
    code = (
        "import a_library.deep.deeper as d, a_library.plain; print(d.found, d.not_private + d._privately, "
        "a_library.plain.value, hasattr(a_library, '_private'), a_library._elsewhere())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "copy")}, capture_output=True, text=True
    )
    assert done.stdout == "of the library 3 3 False of the library\n", done.stderr
    copy = tmp_path / "copy" / library
    assert (copy / "plain").is_symlink() and (copy / "deep" / "__init__.py").is_symlink()
    assert before == {file: file.read_bytes() for file in before}, "the installed library is untouched"


def test_other_texts_are_replaced(library: str, tmp_path: Path) -> None:
    assert renamed_copy(library, "'_private')()", "'other')()", tmp_path / "copy") == 1
    assert renamed_copy(library, "privat", "x", tmp_path / "another") == 0, "part of a word"
    with pytest.raises(ModuleNotFoundError):
        renamed_copy("no_such_library", "_private", "x", tmp_path / "third")


def test_an_invalid_table(tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    for entry in (
        "{library: tqdm, name: a}",
        "{library: tqdm, name: a, test: b, more: c}",
        "{library: 1, name: a, test: b}",
    ):
        file.write_text(f"tqdm.open_bars:\n  - {entry}\n")
        with pytest.raises(ValueError, match="tqdm.open_bars: .* expected the keys"):
            load(file)
