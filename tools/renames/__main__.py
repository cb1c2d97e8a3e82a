"""``make renames``: rename a private name in a copy of its library; the contract test must fail.

For each entry of ``tests/renames.yaml`` the tool copies the installed library, replaces the name everywhere in it, and
runs the test with the copy first on the path:

.. code-block:: yaml

    tqdm.open_bars:                     # a function of alignment/internals/
      - library: tqdm
        name: _instances                # replaced by _instances_moved_away in every file, as a whole word
        test: tests/unit/test_internals_tqdm.py -k while_it_is_open

A failure counts if it comes from the function or from what the test expects of it. It does not count if the test file
uses the name itself, or if the library no longer works. The exit status is 1 if an entry is not detected or does not
apply.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.ranks.client import ADDRESS, ROOT, environment
from tools.renames.copies import renamed_copy
from tools.renames.failures import FAILURES
from tools.renames.table import INTERNALS, TABLE, Rename, load
from tools.trial import CHOOSABLE, Verdict, workspace
from tools.workers import share_out

_TIMEOUT_S = 240.0
_LOOKUPS = ("AttributeError", "ImportError", "KeyError", "ModuleNotFoundError", "NameError", "TypeError")


def attempt(rename: Rename, place: Path) -> Verdict:
    """Rename and test.

    Args:
        rename: the entry.
        place: an empty folder.
    """
    start = time.monotonic()
    try:
        count = renamed_copy(rename.library, rename.name, rename.becomes, place / "copy")
    except ModuleNotFoundError as error:
        return Verdict(False, f"does not apply: {error}", 0.0)
    if not count:
        return Verdict(False, f"does not apply: no file of {rename.library} contains it", time.monotonic() - start)
    failures = place / "failures.jsonl"
    paths = os.pathsep.join(filter(None, (str(place / "copy"), os.environ.get("PYTHONPATH", ""))))
    variables = environment(PYTHONPATH=paths, PYTHONDONTWRITEBYTECODE="1", **{FAILURES: str(failures)})
    variables.pop(ADDRESS, None)  # a running rank server has imported the real library
    plugins = ["-p", "no:cacheprovider", "-p", "tools.renames.failures"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=no",
        "-m",
        CHOOSABLE,
        *plugins,
        *shlex.split(rename.test),
    ]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Verdict(True, "timed out", time.monotonic() - start)
    noticed, how = judged(rename, done, failures)
    return Verdict(noticed, how, time.monotonic() - start)


def judged(rename: Rename, done: subprocess.CompletedProcess[str], failures: Path) -> tuple[bool, str]:
    """Return whether and how the contract test detected the rename. A test that could not run did not detect it."""
    if done.returncode == 0:
        return False, "every test passed"
    if not failures.exists():  # collection failed, or no test was selected
        return False, f"exit status {done.returncode}: {(done.stdout + done.stderr).strip().rpartition(chr(10))[2]}"
    first = json.loads(failures.read_text(encoding="utf-8").splitlines()[0])
    line = " ".join(first["text"].split())[:100]
    test, kind = first["test"].rpartition("::")[2], first["kind"]
    through = any(Path(file).is_relative_to(INTERNALS) for file in first["files"])
    if not through and kind in _LOOKUPS and rename.name in first["text"]:
        return False, f"{Path(first['files'][-1]).name} uses the name itself: {kind}: {line}"
    return True, f"{test}: {kind}{' in the function' if through else ''}: {line}"


class Run:
    """Concurrent attempts of renames."""

    def __init__(self, renames: Sequence[Rename], jobs: int) -> None:
        self.renames, self.jobs = renames, jobs
        self.verdicts: dict[Rename, Verdict] = {}
        self._saying = threading.Lock()

    def __call__(self) -> None:
        """Attempt all renames."""
        with workspace("renames-") as place:
            share_out(self.renames, self.jobs, lambda number: self._worker(place / str(number)))

    def _worker(self, folder: Path) -> Callable[[Rename], None]:
        def handle(rename: Rename) -> None:
            folder.mkdir()
            verdict = attempt(rename, folder)
            shutil.rmtree(folder)
            with self._saying:
                self.verdicts[rename] = verdict
                sign = "detected" if verdict.noticed else "MISSED  "
                print(f"{sign} {verdict.seconds:5.1f} s  {rename}  [{verdict.how}]", flush=True)

        return handle


def main(argv: Sequence[str] | None = None) -> int:
    """Attempt the selected entries; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.renames", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of functions, libraries or names; default: all entries")
    parser.add_argument("--table", type=Path, default=TABLE, help="the file with the entries")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(argv)
    chosen = [rename for rename in load(given.table) if not given.words or any(w in str(rename) for w in given.words)]
    if not chosen:
        raise SystemExit(f"no entry contains {' or '.join(given.words)}")
    run = Run(chosen, given.jobs)
    run()
    missed = [rename for rename in chosen if not run.verdicts[rename].noticed]
    print(
        f"{len(chosen) - len(missed)} of {len(chosen)} renames detected" + "".join(f"\n  not: {one}" for one in missed)
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
