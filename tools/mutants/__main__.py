"""``make mutants``: a seeded sample of random mutants of the package, each against the tests that run its line.

The tests of a mutant are selected by coverage and run in order of cost, until one fails or about three minutes have
passed: unit tests, then tests with engines, then tests that start ranks. An interrupted run continues when it is
started again. After a change of the tests, only surviving mutants are tried again.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.continuing import fingerprint
from tools.mutants.candidates import Source, sample
from tools.mutants.covered import Covered, measured
from tools.mutants.ledger import Entry, Ledger, equivalents, survivors, table
from tools.mutants.mutant import Mutant
from tools.ranks import RankServer
from tools.ranks.client import ROOT
from tools.trial import Tree, Verdict, trials
from tools.workers import share_out

_BUDGETS_S = {"unit": 60.0, "engine": 90.0, "processes": 60.0}  # of the tests of one kind
_MANY = 400  # maximum number of tests selected by name; beyond that, collecting complete files is faster


def kind_of(test: str) -> str:
    """Return the stage of a trial to which a test belongs."""
    if "/unit/" in test:
        return "unit"
    slow = ("_ranks.py", "test_split", "test_rank_failure", "test_guard", "/launch/", "two_ranks")
    return "processes" if any(part in test for part in slow) else "engine"


def stages(tests: Sequence[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """Return the tests for each stage within its time budget, fastest first."""
    for kind, budget in _BUDGETS_S.items():
        chosen: list[str] = []
        spent = 0.0
        for test in sorted((t for t in tests if kind_of(t) == kind), key=lambda t: seconds.get(t, 1.0)):
            spent += seconds.get(test, 1.0)
            if chosen and spent > budget:
                break
            chosen.append(test)
        if len(chosen) > _MANY:
            chosen = sorted({test.partition("::")[0] for test in chosen})
        if chosen:
            yield chosen


class Run:
    """Concurrent trials of mutants, each in a separate tree."""

    def __init__(self, mutants: Sequence[Mutant], covered: Covered, ledger: Ledger, tests: str) -> None:
        self.mutants, self.left = mutants, len(mutants)
        self.covered, self.ledger, self.tests = covered, ledger, tests
        self._saying = threading.Lock()

    def __call__(self, jobs: int) -> None:
        """Try all of them."""
        with trials("mutants-", jobs) as (folders, server):
            share_out(self.mutants, jobs, lambda number: self._worker(folders[number], server))

    def _worker(self, folder: Path, server: RankServer) -> Callable[[Mutant], None]:
        tree = Tree(folder)

        def handle(mutant: Mutant) -> None:
            verdict = self._try(mutant, tree, server)
            entry = Entry(mutant.file, mutant.line, mutant.old, mutant.new, verdict.noticed, verdict.how, self.tests)
            with self._saying:
                self.ledger.add(entry)
                sign = "detected" if entry.noticed else "SURVIVED"
                self.left -= 1
                said = f"{sign} {verdict.seconds:5.1f} s, {self.left:3} left  {describe(entry)}  [{entry.how}]"
                print(said, flush=True)

        return handle

    def _try(self, mutant: Mutant, tree: Tree, server: RankServer) -> Verdict:
        tests = self.covered.tests(mutant.file, mutant.line)
        verdict, seconds = Verdict(False, "no test covers this line", 0.0), 0.0
        with tree.changed(mutant.file, mutant.text):
            for chosen in stages(tests, self.covered.seconds):
                verdict = tree.run_tests(server, chosen, timeout=300)
                seconds += verdict.seconds
                if verdict.noticed:
                    break
        return Verdict(verdict.noticed, verdict.how, seconds)


def describe(entry: Entry) -> str:
    """Describe a mutant in one line."""
    return f"{entry.file}:{entry.line}  {entry.old}  ->  {entry.new or '(removed)'}"


def chosen_mutants(folder: Path, count: int, seed: int) -> list[Mutant]:
    """Return the sample stored in ``folder`` without mutants that no longer apply, or create a new sample."""
    kept = folder / "sample.json"
    files = list((ROOT / "alignment").rglob("*.py"))
    if not kept.exists():
        mutants = sample(files, ROOT, count, seed)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps([mutant.change for mutant in mutants], indent=1))
        return mutants
    wanted = [tuple(change) for change in json.loads(kept.read_text())]
    found: dict[tuple[str, ...], Mutant] = {}
    for file in sorted({change[0] for change in wanted}):
        changes = {change for change in wanted if change[0] == file}
        if (ROOT / file).exists():
            source = Source(file, (ROOT / file).read_text(encoding="utf-8"))
            found |= {mutant.change: mutant for mutant in source.find({change[1:] for change in changes})}
    for change in wanted:
        if change not in found:
            print(f"no longer applies: {' | '.join(change)}")
    return [found[change] for change in wanted if change in found]


def main() -> None:
    """Sample, try, report."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=220, help="number of mutants of a new sample")
    parser.add_argument("--seed", type=int, default=0, help="seed of a new sample")
    parser.add_argument(
        "--folder", type=Path, help="folder for files that are kept between runs; default: outputs/mutants-SEED"
    )
    parser.add_argument("--measure", action="store_true", help="measure the coverage again")
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    folder = given.folder or ROOT / "outputs" / f"mutants-{given.seed}"
    ledger, tests, known = Ledger(folder / "ledger.jsonl"), fingerprint(), equivalents()
    mutants = chosen_mutants(folder, given.count, given.seed)
    if not given.report:
        left = [m for m in mutants if m.change not in known and not ledger.is_done(m, tests)]
        print(f"{len(mutants)} mutants, {len(left)} to try", flush=True)
        if left:
            Run(left, measured(folder, given.measure), ledger, tests)(given.jobs)
    entries = [ledger.entries[key] for m in mutants if (key := m.change) in ledger.entries]
    missed = survivors(entries, known)
    for entry in missed:
        print(f"SURVIVED  {describe(entry)}  [{entry.how}]")
    print("\n".join(table(entries, known)))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
