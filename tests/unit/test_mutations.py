"""The mutations of ``tests/mutations/`` apply to the current code; ``make mutations`` shows that tests detect them."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

from tools.mutants.ledger import equivalents
from tools.mutations import Mutation, load

# Part of a test's name in a ``-k`` expression; words with a dash are parameters, which a file may not spell out.
NAME = re.compile(r"(?<![\w-])[a-z0-9]+(?:_[a-z0-9]+)+(?![\w-])")
ENTRY = """\
- name: a name
  file: alignment/__init__.py
  original: '__version__ = "0.'
  replacement: '__version__ = "1.'
  tests: [tests/unit/test_mutations.py]
"""


AREAS = {area: list(mutations) for area, mutations in itertools.groupby(load(), lambda mutation: mutation.area)}


@pytest.mark.parametrize("area", AREAS)
def test_mutations_apply_and_name_their_tests(area: str) -> None:
    for mutation in AREAS[area]:
        check(mutation)


def check(mutation: Mutation) -> None:
    mutated = mutation.mutated()
    if mutation.file.endswith(".py"):
        compile(mutated, mutation.file, "exec")
    elif not mutation.file.endswith(".md"):
        subprocess.run(["bash", "-n"], input=mutated, text=True, check=True)  # a script for SLURM
    assert mutation.tests, mutation.name
    for tests in mutation.tests:
        chosen, _, keywords = tests.partition(" -k ")
        file, _, name = chosen.partition(" ")[0].partition("::")
        text = (ROOT / file).read_text()
        assert not name or f"def {name.partition('[')[0]}(" in text, f"{mutation.name}: {tests}"
        for word in NAME.findall(keywords):
            assert word in text, f"{mutation.name}: -k {word} selects no test of {file}"


def test_there_are_enough_of_them() -> None:
    assert sum(map(len, AREAS.values())) >= 100


def write(folder: Path, text: str) -> Path:
    (folder / "area.yaml").write_text(text)
    return folder


def test_an_entry(tmp_path: Path) -> None:
    (mutation,) = load(write(tmp_path, ENTRY))
    assert (mutation.area, mutation.name) == ("area", "a name")
    assert mutation.mutated() == (ROOT / "alignment" / "__init__.py").read_text().replace('"0.', '"1.', 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENTRY.replace("original: '__version__ = ", "original: 'no such text"), "0 times in alignment/__init__.py"),
        (
            ENTRY.replace("original: '__version__ = \"0.", "original: 'alignment"),
            "times in alignment/__init__.py, not",
        ),
        (ENTRY.replace("__init__.py", "nowhere.py"), "alignment/nowhere.py does not exist"),
    ],
)
def test_a_mutation_that_does_not_apply(tmp_path: Path, text: str, said: str) -> None:
    (mutation,) = load(write(tmp_path, text))
    with pytest.raises(ValueError, match=said):
        mutation.mutated()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENTRY + ENTRY, "duplicate names of mutations: a name"),
        (ENTRY.replace("replacement", "replaced"), "area.yaml: a name: keys must be"),
        (ENTRY.replace("'__version__ = \"1.'", "1"), "area.yaml: a name: all values except tests must be strings"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(write(tmp_path, text))


def test_every_equivalent_mutant_has_its_reason() -> None:
    """And refers to code that still exists, because an obsolete entry would be misleading."""
    for (file, old, _), why in equivalents().items():
        lines = {line.strip() for line in (ROOT / file).read_text().splitlines()}
        assert len(why) > 10 and set(old.split(" ⏎ ")) <= lines, (file, old)
