"""``make renames``: rename a private name in a copy of its library; the contract test must fail.

For each entry of ``tests/renames.yaml`` the tool copies the installed library, replaces the name everywhere in it, and
runs the test with the copy first on the path:

.. code-block:: yaml

    tqdm.open_bars:                     # a function of alignment/internals/
      - library: tqdm
        name: _instances                # replaced by _instances_moved_away in every file, as a whole word
        test: tests/unit/test_internals_tqdm.py -k while_it_is_open

The exit status is 1 if an entry does not apply, or if its test passes or fails only because it uses the name itself.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from tools.ranks.client import ADDRESS, ROOT, environment
from tools.trial import CHOOSABLE, Verdict, reported, workspace

TABLE = ROOT / "tests" / "renames.yaml"
_PYTEST = ("-m", "pytest", "-x", "-q", "--tb=native", "-p", "no:cacheprovider", "-m", CHOOSABLE)
_LOOKUPS = "AttributeError|ImportError|KeyError|ModuleNotFoundError|NameError|TypeError"


@dataclass(frozen=True)
class Rename:
    """An entry: a function of ``alignment/internals/`` (``module.function``), a name that it uses, and its test."""

    function: str
    library: str
    name: str
    test: str
    becomes: str = ""

    def __str__(self) -> str:
        return f"{self.function}: {self.library}'s {self.name}"

    @property
    def replacement(self) -> str:
        """An unused name; ``_moved_away`` follows the first word, so that it does not contain the old name."""
        return self.becomes or re.sub(r"\w+", r"\g<0>_moved_away", self.name, count=1)


def load() -> Iterator[Rename]:
    """Yield all entries, in the order of the file."""
    for function, entries in yaml.safe_load(TABLE.read_text(encoding="utf-8")).items():
        yield from (Rename(function, **entry) for entry in entries)


def renamed_copy(rename: Rename, folder: Path) -> int:
    """Copy the library to ``folder`` with the name replaced everywhere; return the number of files that contain it.

    Files that do not contain the name are symbolic links.
    """
    spec = importlib.util.find_spec(rename.library)
    assert spec is not None and spec.submodule_search_locations, f"{rename.library} is not an installed package"
    source, count = Path(spec.submodule_search_locations[0]), 0
    # A word boundary only where the name starts or ends with a word character.
    edges = r"(?<!\w)" * bool(re.match(r"\w", rename.name)), r"(?!\w)" * bool(re.search(r"\w$", rename.name))
    pattern = re.compile(re.escape(rename.name).join(edges).encode())
    for file in source.rglob("*"):
        target = folder / rename.library / file.relative_to(source)
        if "__pycache__" in file.parts or not file.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_bytes() if file.suffix == ".py" else b""
        changed, found = pattern.subn(lambda _: rename.replacement.encode(), text)
        count += bool(found)
        target.write_bytes(changed) if found else target.symlink_to(file)
    return count


def attempt(rename: Rename, place: Path) -> Verdict:
    """Rename and test."""
    start = time.monotonic()
    if not renamed_copy(rename, place):
        return Verdict(False, f"does not apply: no file of {rename.library} contains it", 0.0)
    paths = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH", ""))))
    variables = environment(PYTHONPATH=paths, PYTHONDONTWRITEBYTECODE="1")
    variables.pop(ADDRESS, None)  # a running rank server has imported the real library
    command = [sys.executable, *_PYTEST, *shlex.split(rename.test)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)
    seconds = time.monotonic() - start
    lookup = re.search(rf"^(?:{_LOOKUPS}): .*{re.escape(rename.name)}", done.stdout, re.MULTILINE)
    if done.returncode == 1 and lookup and "alignment/internals/" not in done.stdout:
        return Verdict(False, f"the test uses the name itself: {lookup[0]}", seconds)
    return Verdict(done.returncode == 1, done.stdout.strip().rpartition("\n")[2], seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Attempt the selected entries; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.renames", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of functions, libraries or names; default: all entries")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(argv)
    chosen = [rename for rename in load() if not given.words or any(word in str(rename) for word in given.words)]
    with workspace("renames-") as place, ThreadPoolExecutor(given.jobs) as pool:
        folders = [place / str(number) for number in range(len(chosen))]
        return reported(zip(chosen, pool.map(attempt, chosen, folders)))


if __name__ == "__main__":
    sys.exit(main())
