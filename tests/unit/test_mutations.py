"""The mutations of ``tests/mutations/`` apply to the current code; ``make mutations`` shows that tests detect them."""

from __future__ import annotations

import itertools
import re
import subprocess

import pytest
from conftest import ROOT

from tools.mutations import Mutation, equivalents, load

# Part of a test's name in a ``-k`` expression; words with a dash are parameters, which a file may not spell out.
NAME = re.compile(r"(?<![\w-])[a-z0-9]+(?:_[a-z0-9]+)+(?![\w-])")


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


def test_every_equivalent_mutant_has_its_reason() -> None:
    """And refers to code that still exists, because an obsolete entry would be misleading."""
    for (file, old, _), why in equivalents().items():
        lines = {line.strip() for line in (ROOT / file).read_text().splitlines()}
        assert len(why) > 10 and set(old.split(" ⏎ ")) <= lines, (file, old)
