"""``make mutations``: apply each mutation of ``tests/mutations/`` to a copy of the package; its test must fail.

A mutation is a mistake that was made or could be made. Each one has an entry below the file that it changes:

.. code-block:: yaml

    alignment/engines/scoring.py:
      - name: gradients are summed over ranks, not averaged
        original: loss * self.world_size          # occurs exactly once in the file
        replacement: loss
        tests: [tests/engine/test_split_grid.py -k CPO-stage2-2]  # tests of `make test`, one of which fails

The exit status is 1 if a mutation survives, if its text does not occur exactly once in the file, if none of its tests
is selected, or if the test that detected it also fails without the mutation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.ranks.client import ROOT
from tools.trial import Tree, Verdict, reported, tried

FOLDER = ROOT / "tests" / "mutations"
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Mutation:
    """An entry as described in the module's docstring; ``area`` is the name of the YAML file."""

    area: str
    name: str
    file: str
    original: str
    replacement: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.area}: {self.name}"

    def mutated(self) -> str:
        """Return the text of the mutated file; a ValueError if the mutation does not apply."""
        path = ROOT / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.original) != 1:
            raise ValueError(f"its text occurs {text.count(self.original)} times in {self.file}, not once")
        return text.replace(self.original, self.replacement)


def load(folder: Path = FOLDER) -> list[Mutation]:
    """Load all mutations, in the order of the files; a ValueError if a name is repeated."""
    found: dict[str, Mutation] = {}
    for area in sorted(path for path in folder.glob("*.yaml") if path.name != "equivalent.yaml"):
        files: dict[str, list[dict[str, Any]]] = yaml.safe_load(area.read_text(encoding="utf-8"))
        for file, entry in ((file, entry) for file, entries in files.items() for entry in entries):
            if entry["name"] in found:
                raise ValueError(f"{area.name}: {entry['name']}: duplicate name")
            found[entry["name"]] = Mutation(area.stem, file=file, **{**entry, "tests": tuple(entry["tests"])})
    return list(found.values())


def equivalents() -> dict[tuple[str, str, str], str]:
    """Load mutants that no test can detect, by file and change, and the reasons why."""
    listed: dict[str, list[dict[str, str]]] = yaml.safe_load((FOLDER / "equivalent.yaml").read_text(encoding="utf-8"))
    return {(file, entry["old"], entry["new"]): entry["why"] for file in listed for entry in listed[file]}


def _attempt(mutation: Mutation, tree: Tree, unchanged: dict[str, Verdict]) -> Verdict:
    """Run the tests of a mutation until one fails, and that one without the mutation as well."""
    try:
        text = mutation.mutated()
    except ValueError as error:
        return Verdict(False, f"does not apply: {error}", 0.0)
    with tree.changed(mutation.file, text):
        for tests in mutation.tests:
            verdict = tree.run_tests(tests.split(maxsplit=2), _TIMEOUT_S)
            if verdict.noticed:
                break
    # A mutation that cannot be imported does not show that the test detects it.
    if not verdict.noticed or verdict.how.startswith("exit status"):
        return verdict._replace(noticed=False)
    if tests not in unchanged:
        unchanged[tests] = tree.run_tests(tests.split(maxsplit=2), _TIMEOUT_S)
    if unchanged[tests].noticed:
        return verdict._replace(noticed=False, how=f"fails without the mutation: {unchanged[tests].how}")
    return verdict


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected mutations; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names or areas; default: all mutations")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder with the mutation files")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(argv)
    names, unchanged = given.names or [""], dict[str, Verdict]()
    chosen = [mutation for mutation in load(given.folder) if any(part in str(mutation) for part in names)]
    verdicts = tried(chosen, lambda one, tree: _attempt(one, tree, unchanged), given.jobs)
    return reported(verdicts)


if __name__ == "__main__":
    sys.exit(main())
