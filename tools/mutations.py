"""``make mutations``: apply each mutation of ``tests/mutations/`` to a copy of the package; its test must fail.

A mutation is a mistake that was made or could be made. Each one has an entry:

.. code-block:: yaml

    - name: gradients are summed over ranks, not averaged
      file: alignment/engines/scoring.py
      original: loss * self.world_size          # occurs exactly once in the file
      replacement: loss
      tests: [tests/engine/test_split_grid.py -k CPO-stage2-2]  # tests of `make test`, one of which fails

The exit status is 1 if a mutation survives, if its text does not occur exactly once in the file, if none of its tests
is selected, or if the test that detected it also fails without the mutation.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.ranks import RankServer
from tools.ranks.client import ROOT
from tools.trial import Tree, Verdict, trials
from tools.workers import share_out

FOLDER = ROOT / "tests" / "mutations"
_KEYS = {"name", "file", "original", "replacement", "tests"}
_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Mutation:
    """An entry as described in the module's docstring; ``area`` is the name of its file."""

    area: str
    name: str
    file: str
    original: str
    replacement: str
    tests: tuple[str, ...]

    def mutated(self) -> str:
        """Return the text of the mutated file.

        Raises:
            ValueError: the mutation does not apply.
        """
        path = ROOT / self.file
        if not path.is_file():
            raise ValueError(f"{self.file} does not exist")
        text = path.read_text(encoding="utf-8")
        if text.count(self.original) != 1:
            raise ValueError(f"its text occurs {text.count(self.original)} times in {self.file}, not once")
        return text.replace(self.original, self.replacement)


def load(folder: Path = FOLDER) -> list[Mutation]:
    """Load all mutations, in the order of the files.

    Raises:
        ValueError: an entry has missing or unknown keys, or a duplicate name.
    """
    found: list[Mutation] = []
    for file in sorted(folder.glob("*.yaml")):
        if file.name == "equivalent.yaml":
            continue  # equivalent random mutants, for tools/mutants
        for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
            found.append(_mutation(file.stem, entry))
    names = [mutation.name for mutation in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"duplicate names of mutations: {', '.join(twice)}")
    return found


def _mutation(area: str, entry: dict[str, Any]) -> Mutation:
    if set(entry) != _KEYS:
        raise ValueError(f"{area}.yaml: {entry.get('name', entry)}: keys must be {', '.join(sorted(_KEYS))}")
    values = {key: entry[key] for key in _KEYS - {"tests"}}
    if not all(isinstance(value, str) for value in values.values()):
        raise ValueError(f"{area}.yaml: {entry['name']}: all values except tests must be strings; add quotes")
    return Mutation(area, tests=tuple(entry["tests"]), **values)


class Run:
    """Concurrent trials of mutations, each in a separate tree."""

    def __init__(self, mutations: Sequence[Mutation], jobs: int) -> None:
        self.mutations, self.jobs = mutations, jobs
        self.verdicts: dict[str, Verdict] = {}
        self._saying = threading.Lock()
        self._unchanged: dict[str, Verdict] = {}  # results of tests on the unmodified code, by command

    def __call__(self) -> bool:
        """Try all mutations; return whether every one was detected."""
        with trials("mutations-", self.jobs) as (folders, server):
            share_out(self.mutations, self.jobs, lambda number: self._worker(folders[number], server))
        return all(verdict.noticed for verdict in self.verdicts.values())

    def _worker(self, folder: Path, server: RankServer) -> Callable[[Mutation], None]:
        tree = Tree(folder)

        def handle(mutation: Mutation) -> None:
            verdict = self._try(mutation, tree, server)
            with self._saying:
                self.verdicts[mutation.name] = verdict
                sign = "detected" if verdict.noticed else "SURVIVED"
                print(
                    f"{sign} {verdict.seconds:5.1f} s  {mutation.area}: {mutation.name}  [{verdict.how}]", flush=True
                )

        return handle

    def _try(self, mutation: Mutation, tree: Tree, server: RankServer) -> Verdict:
        try:
            text = mutation.mutated()
        except ValueError as error:
            return Verdict(False, f"does not apply: {error}", 0.0)
        with tree.changed(mutation.file, text):
            for tests in mutation.tests:
                verdict = tree.run_tests(server, tests.split(maxsplit=2), _TIMEOUT_S)
                if verdict.noticed:
                    break
        # A mutation that cannot be imported does not show that the test detects it.
        if verdict.how.startswith("exit status"):
            return Verdict(False, verdict.how, verdict.seconds)
        if verdict.noticed and (before := self._without_mutation(tests, tree, server)).noticed:
            return Verdict(False, f"fails without the mutation: {before.how}", verdict.seconds)
        return verdict

    def _without_mutation(self, tests: str, tree: Tree, server: RankServer) -> Verdict:
        """Run tests on the unmodified code, once for each command (twice if two workers ask at the same time)."""
        if tests not in self._unchanged:
            self._unchanged[tests] = tree.run_tests(server, tests.split(maxsplit=2), _TIMEOUT_S)
        return self._unchanged[tests]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the selected mutations; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutations", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names or areas; default: all mutations")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder with the mutation files")
    parser.add_argument("--sample", type=int, help="number of mutations to sample at random")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(argv)
    chosen = [
        mutation
        for mutation in load(given.folder)
        if not given.names or any(part in f"{mutation.area}: {mutation.name}" for part in given.names)
    ]
    if given.sample is not None:
        print(f"a sample of {given.sample}, --seed {given.seed}")
        chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))
    if not chosen:
        raise SystemExit(f"no mutation matches {' or '.join(given.names)}")
    run = Run(chosen, given.jobs)
    good = run()
    survived = [name for name, verdict in run.verdicts.items() if not verdict.noticed]
    print(
        f"{len(chosen) - len(survived)} of {len(chosen)} mutations detected"
        + "".join(f"\n  not: {n}" for n in survived)
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
