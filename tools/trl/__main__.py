"""``python -m tools.trl CHECKOUT...``: run TRL's own tests of these checkouts against this package.

Checkouts are not modified. Print a table of releases and files; exit with status 1 if ``expected.txt``, which lists
the tests that fail with the reasons, is wrong about a test that ran.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from tools.documentation.page import table
from tools.ranks.client import ROOT
from tools.trial import workspace
from tools.trl.hub.build import environment, prepare

EXPECTED = Path(__file__).with_name("expected.txt")
_TRAINERS = ("kto", "cpo", "online_dpo", "reward", "sft")


def command_line(name: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that the tests and the scripts have in common."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=(about or "").splitlines()[0])
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders of TRL's repository, one for each release")
    parser.add_argument("--jobs", type=int, default=2, help="number of concurrent processes")
    parser.add_argument("--hub", type=Path, default=ROOT / "outputs" / "trl-hub", help="folder for the local Hub")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests and return the exit status."""
    parser = command_line("tools.trl", __doc__)
    parser.add_argument("--only", default="", help="only tests that this expression of pytest's -k selects")
    given = parser.parse_args(argv)
    outcomes: dict[str, str] = {}
    for checkout in given.checkouts:
        outcomes |= run(checkout.resolve(), given.only, given.jobs, prepare(given.hub))
    wrong = problems(outcomes, read(EXPECTED.read_text(encoding="utf-8")), everything=not given.only)
    print("\n".join((*counts(outcomes), "", *wrong)))
    return int(bool(wrong))


def release(checkout: Path) -> str:
    """Return the release of a checkout."""
    file = checkout / "VERSION"
    text = file.read_text() if file.exists() else (checkout / "trl" / "__init__.py").read_text()
    found = re.search(r"^(?:__version__ = \"|)(\d[\w.]+)", text, re.M)
    assert found is not None, f"{checkout} is not a checkout of TRL: it has no version"
    return found[1]


def run(checkout: Path, only: str, jobs: int, hub: Path) -> dict[str, str]:
    """Run the tests of the trainers that this package has; return ``passed``, ``skipped`` or the error of each."""
    with workspace("trl-") as folder:
        shutil.copytree(checkout / "tests", folder / "tests", ignore=shutil.ignore_patterns("conftest.py"))
        files = [file for name in _TRAINERS for file in folder.glob(f"tests/**/test_{name}_trainer.py")]
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "-p", "tools.trl.plugin", "-c", os.devnull]
        command += [f"--rootdir={folder}", f"--checkout={checkout}", f"--junitxml={folder}/outcomes.xml", "-k", only]
        subprocess.run([*command, *map(str, files)], cwd=folder, env=environment(hub), check=False)
        cases = ElementTree.parse(folder / "outcomes.xml").iter("testcase")
        return {f"{release(checkout)}/{_name(case)}": _outcome(case) for case in cases}


def _name(case: ElementTree.Element) -> str:
    """Return ``FILE::CLASS::TEST``."""
    parts = case.get("classname", "").split(".")
    start = next(number for number, part in enumerate(parts) if part.startswith("test_"))
    return "::".join((f"{parts[start]}.py", *parts[start + 1 :], case.get("name", "")))


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("skipped", "failure", "error"):
        if (found := case.find(kind)) is not None:
            return kind if kind == "skipped" else " ".join(found.get("message", "").split())[:200] or kind
    return "passed"


def read(text: str) -> dict[str, str]:
    """Return the reasons by pattern of test names: lines of ``pattern | reason``, and comments."""
    lines = [line.partition(" | ") for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {pattern.strip(): reason for pattern, _, reason in lines}


def problems(outcomes: Mapping[str, str], expected: Mapping[str, str], everything: bool) -> Iterable[str]:
    """Yield what is wrong: failures that are not expected, and, of all tests, patterns that match no failure."""
    failed = {name: outcome for name, outcome in outcomes.items() if outcome not in ("passed", "skipped")}
    # Of a pattern, only * is special.
    found = {pattern: fnmatch.filter(failed, pattern.replace("[", "[[]")) for pattern in expected}
    known = {name for names in found.values() for name in names}
    yield from (f"{name} fails, which is not expected: {why}" for name, why in failed.items() if name not in known)
    if everything:
        yield from (f"{pattern} matches no test that fails: remove it" for pattern in expected if not found[pattern])


def counts(outcomes: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a Markdown table with the numbers of tests by release and file."""
    count = Counter[tuple[str, str]]()
    for name, outcome in outcomes.items():
        for file in (name.partition("::")[0], "all"):
            count[file, outcome if outcome in ("passed", "skipped") else "failed"] += 1
    files = sorted({file for file, _ in count}, key=lambda file: (file == "all", file))
    rows = ((file, *(count[file, kind] for kind in ("passed", "failed", "skipped"))) for file in files)
    return table("file | passed | failed | skipped", rows)


if __name__ == "__main__":
    sys.exit(main())
