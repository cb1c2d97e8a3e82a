"""``make mutants``: a seeded sample of random mutants of the package, each against the tests that run its line.

The tests of a mutant are selected by coverage and run in order of cost, until one fails or about three minutes have
passed: unit tests, then tests with engines, then tests that start ranks. An interrupted run continues when it is
started again. After a change of the tests, only surviving mutants are tried again, with the coverage measured before,
which is in ``outputs/mutants-SEED/covered.pickle``; after a change of the package, the sample is another one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence

from tests.support.continuing import append, entries, fingerprint
from tools.mutants.candidates import Mutant, sample
from tools.mutants.covered import Covered, measured
from tools.mutations import equivalents
from tools.ranks.client import ROOT
from tools.trial import Tree, Verdict, reported, tried

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
        own = sorted((seconds.get(test, 1.0), test) for test in tests if kind_of(test) == kind)
        spent = itertools.accumulate(duration for duration, _ in own)
        chosen = [test for number, (total, (_, test)) in enumerate(zip(spent, own)) if not number or total <= budget]
        if len(chosen) > _MANY:
            chosen = sorted({test.partition("::")[0] for test in chosen})
        if chosen:
            yield chosen


def _attempt(mutant: Mutant, tree: Tree, covered: Covered) -> Verdict:
    verdict, seconds = Verdict(False, "no test covers this line", 0.0), 0.0
    with tree.changed(mutant.file, mutant.text):
        for chosen in stages(covered.tests(mutant.file, mutant.line), covered.seconds):
            verdict = tree.run_tests(chosen, timeout=300)
            seconds += verdict.seconds
            if verdict.noticed:
                break
    return verdict._replace(seconds=seconds)


def main() -> int:
    """Sample, try, report."""
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=220, help="number of mutants of the sample")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--report", action="store_true", help="only print the results so far")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    folder = ROOT / "outputs" / f"mutants-{given.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    ledger, tests, known = folder / "ledger.jsonl", fingerprint(), equivalents()
    drawn = sample(list((ROOT / "alignment").rglob("*.py")), ROOT, given.count, given.seed)
    mutants = [mutant for mutant in drawn if mutant.change not in known]
    results = {(entry["file"], entry["old"], entry["new"]): entry for entry in entries(ledger)}
    # Mutants that were detected, or survived the current tests.
    done = {change for change, entry in results.items() if given.report or entry["noticed"] or entry["tests"] == tests}
    left = [] if given.report else [mutant for mutant in mutants if mutant.change not in done]
    print(f"{len(drawn)} mutants, {len(drawn) - len(mutants)} known to be equivalent, {len(left)} to try", flush=True)

    def verdicts() -> Iterator[tuple[Mutant, Verdict]]:
        for mutant in mutants:
            if mutant.change in done:
                yield mutant, Verdict(results[mutant.change]["noticed"], results[mutant.change]["how"], 0.0)
        covered = measured(folder) if left else Covered({}, {})
        for mutant, verdict in tried(left, lambda one, tree: _attempt(one, tree, covered), given.jobs) if left else ():
            change = dict(zip(("file", "old", "new"), mutant.change))
            append(ledger, {**change, "noticed": verdict.noticed, "how": verdict.how, "tests": tests})
            yield mutant, verdict

    return reported(verdicts())


if __name__ == "__main__":
    sys.exit(main())
