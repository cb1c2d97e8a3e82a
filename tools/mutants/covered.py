"""Determine which tests cover which lines: measured once for a state of the code, then stored.

This module is also the pytest plugin of that measurement.
"""

from __future__ import annotations

import ast
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.support.continuing import entries, without_group
from tools.ranks.client import ROOT, environment
from tools.ranks.process import COVERAGE

# Ranks measure their own coverage and record the test in which they run.
_SETTINGS = """\
[run]
source = {source}
data_file = {data}
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected
patch = _exit
"""


@dataclass(frozen=True)
class Covered:
    """Tests by file and line, none for lines that run when their module is imported, and the duration of each test."""

    lines: dict[str, dict[int, list[str]]]
    seconds: dict[str, float]

    def tests(self, file: str, line: int) -> list[str]:
        """Return the tests that cover the statement around ``line``.

        A line outside of functions runs when its file is imported, and its value may matter wherever the file is
        used: all unit tests, and all tests in test files that cover any line of the file.
        """
        lines, best = self.lines.get(file, {}), range(10**9)
        tree, in_function = ast.parse((ROOT / file).read_text(encoding="utf-8")), False
        for node in ast.walk(tree):
            if not isinstance(node, ast.stmt):
                continue
            end = (node.end_lineno or node.lineno) + 1
            body: list[ast.stmt] = getattr(node, "body", [])
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                in_function |= line in range(body[0].lineno, end)
            # The innermost statement, without the body of a block.
            own = range(node.lineno, max(node.lineno + 1, body[0].lineno) if body else end)
            best = own if line in own and len(own) <= len(best) else best
        if not in_function:
            users = {test.partition("::")[0] for tests in lines.values() for test in tests}
            return sorted(test for test in self.seconds if "/unit/" in test or test.partition("::")[0] in users)
        return sorted({test for number in best for test in lines.get(number, ())})


def measured(folder: Path) -> Covered:
    """Load an earlier measurement from ``folder``, or make a new one, which takes twice as long as ``make test``."""
    kept, place = folder / "covered.pickle", folder / "coverage"
    if not kept.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _run(place)
        seconds = {entry["test"]: entry["seconds"] for entry in entries(place / "times.jsonl")}
        kept.write_bytes(pickle.dumps(Covered(_lines(place), seconds)))
    covered: Covered = pickle.loads(kept.read_bytes())
    return covered


def pytest_configure() -> None:
    """Measure the Python processes started by tests as well (coverage.py installs the hook)."""
    os.environ["COVERAGE_PROCESS_START"] = os.environ[COVERAGE]


def _run(folder: Path) -> None:
    """Run `make test` with coverage, including ranks."""
    settings, data = folder / "coveragerc", str(folder / "data")
    settings.write_text(_SETTINGS.format(source=ROOT / "alignment", data=data))
    variables = {COVERAGE: str(settings), "COVERAGE_FILE": data, "OMP_NUM_THREADS": "1"}
    options = "-n 2 --dist loadgroup --no-loadscope-reorder -q --tb=short -p tools.mutants.covered".split()
    options += ["--cov", str(ROOT / "alignment"), "--cov-context", "test", "--cov-report", ""]
    options += ["--record", str(folder / "times.jsonl")]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, env=environment(**variables))
    if done.returncode:
        raise SystemExit("the tests fail without a mutant; fix them first")


def _lines(folder: Path) -> dict[str, dict[int, list[str]]]:
    """Return tests by file and line. Lines covered in a fixture are assigned to all tests of its file."""
    import coverage

    measured = coverage.Coverage(data_file=str(folder / "data"), config_file=False)
    measured.load()
    measured.combine([str(folder)], keep=True)  # data of ranks that ended after pytest had combined the files
    data = measured.get_data()
    by_file = defaultdict(set)
    for context in data.measured_contexts():
        if test := _test_of(context):
            by_file[test.partition("::")[0]].add(test)
    found: dict[str, dict[int, list[str]]] = {}
    for file in data.measured_files():
        name = str(Path(file).relative_to(ROOT)) if Path(file).is_relative_to(ROOT) else file
        found[name] = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            tests = set[str]()
            for context in contexts:
                if test := _test_of(context):
                    in_fixture = context.endswith(("|setup", "(setup)"))
                    tests |= by_file[test.partition("::")[0]] if in_fixture else {test}
            found[name][line] = sorted(tests)
    return found


def _test_of(context: str) -> str:
    """Return the test in ``FILE::TEST|run`` (pytest-cov) or ``FILE::TEST (call)`` (pytest's environment), or ""."""
    name = re.sub(r"(\|\w+| \(\w+\))$", "", context)
    return without_group(name) if "::" in name else ""
