"""Trials: a copy of the checkout, a change to one of its files, and the tests that should detect it."""

from __future__ import annotations

import compileall
import contextlib
import os
import py_compile
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.ranks import RankServer, RanksFailed
from tools.ranks.client import ADDRESS, ROOT

_RUN_PYTEST = ROOT / "tools" / "ranks" / "run_pytest.py"
CHOOSABLE = "not slow and not faults"
_TESTS_FAILED, _NO_TESTS = 1, 5  # pytest's exit codes


@dataclass(frozen=True)
class Verdict:
    """The result of running tests on a change.

    Attributes:
        noticed: whether a test failed, timed out, or could not be imported.
        how: short explanation: the test that failed, ``timed out`` …, or why no test ran.
        seconds: duration.
    """

    noticed: bool
    how: str
    seconds: float


class Tree:
    """A copy of the checkout's files, committed or not, except files ignored by git.

    Args:
        folder: folder of the copy; must not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():  # skip deleted files that are still in the index
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        # By hash, not by time: two changes of a file within a second would use the same bytecode.
        for part in ("alignment", "tests"):
            mode = py_compile.PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(folder / part, quiet=2, invalidation_mode=mode)

    @contextlib.contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        """Replace the content of ``file`` with ``text`` within this context."""
        path = self.folder / file
        before = path.read_text(encoding="utf-8")
        path.write_text(text, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")

    def run_tests(self, server: RankServer, chosen: Sequence[str], timeout: float) -> Verdict:
        """Run tests of this tree until one fails.

        Args:
            server: server that runs pytest in a forked process, and the ranks of the tests.
            chosen: files, node IDs and further arguments of pytest.
            timeout: maximum duration in seconds.
        """
        own = RankServer(self.folder, address=server.address)
        arguments = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", CHOOSABLE, *chosen]
        # Rows are cached by the content of their files: the cache of another trial would hide changes of readers.
        with tempfile.TemporaryDirectory(prefix="datasets-") as cache:
            variables = {ADDRESS: server.address, "PYTHONDONTWRITEBYTECODE": "1", "HF_DATASETS_CACHE": cache}
            try:
                done = own.run(
                    _RUN_PYTEST, *arguments, nproc=1, timeout=timeout, env=variables, cwd=self.folder, check=False
                )
            except RanksFailed as error:
                return Verdict(True, "timed out", error.outcome.ranks[0].seconds)
        seconds = done.ranks[0].seconds
        if done.returncode == 0:
            return Verdict(False, "every test passed", seconds)
        if "no match in any of" in done.stderr + done.stdout and any("::" in test for test in chosen):
            # A test was renamed after the tests were selected, or the change itself renames one.
            files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
            return self.run_tests(server, files, timeout)
        if done.returncode == _NO_TESTS:
            return Verdict(False, "no test was selected", seconds)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
        if done.returncode == _TESTS_FAILED and failed:
            return Verdict(True, failed[1], seconds)
        reason = failed[1] if failed else (done.stdout + done.stderr).strip().rpartition("\n")[2]
        return Verdict(True, f"exit status {done.returncode}: {reason}", seconds)


@contextlib.contextmanager
def workspace(prefix: str) -> Iterator[Path]:
    """Create a temporary folder for trees, in memory if possible."""
    folder = tempfile.mkdtemp(prefix=prefix, dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def trials(prefix: str, jobs: int) -> Iterator[tuple[list[Path], RankServer]]:
    """Provide folders for ``jobs`` trees and a running server for their tests within this context."""
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # as in tests/conftest.py, because a library of the server may import triton
    server = RankServer()
    with workspace(prefix) as place:
        try:
            assert server.address
            yield [place / str(number) for number in range(jobs)], server
        finally:
            server.close()
