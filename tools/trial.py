"""Trials: copies of the checkout, a change to a file of one, and the tests that should detect it."""

from __future__ import annotations

import compileall
import contextlib
import os
import py_compile
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from tools.ranks import RankServer, RanksFailed
from tools.ranks.client import ADDRESS, LAUNCHER_VARIABLES, ROOT

CHOOSABLE = "not slow and not faults"
Item = TypeVar("Item")


class Verdict(NamedTuple):
    """Whether tests detected a change, how (the test that failed, ``timed out`` …), and the duration."""

    noticed: bool
    how: str
    seconds: float


class Tree:
    """A copy of the checkout's files in a new folder, committed or not, except files ignored by git.

    The server runs pytest in a forked process, and the ranks of the tests.
    """

    def __init__(self, folder: Path, server: RankServer | None = None) -> None:
        self.folder, self.server = folder, server
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():  # skip deleted files that are still in the index
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        # By hash, not by time: two changes of a file within a second would use the same bytecode.
        mode = py_compile.PycInvalidationMode.CHECKED_HASH
        for part in ("alignment", "tests"):
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

    def run_tests(self, chosen: Sequence[str], timeout: float) -> Verdict:
        """Run tests of this tree, given as arguments of pytest, until one fails or ``timeout`` seconds have passed."""
        assert self.server is not None
        arguments = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", CHOOSABLE, *chosen]
        own = RankServer(self.folder, address=self.server.address)
        # Rows are cached by the content of their files: the cache of another trial would hide changes of readers.
        with tempfile.TemporaryDirectory(prefix="datasets-") as cache:
            env = {ADDRESS: self.server.address, "PYTHONDONTWRITEBYTECODE": "1", "HF_DATASETS_CACHE": cache}
            given = {"nproc": 1, "timeout": timeout, "env": env, "cwd": self.folder, "check": False}
            try:
                (done,) = own.run(__file__, *arguments, **given).ranks  # type: ignore[arg-type]
            except RanksFailed as error:
                return Verdict(True, "timed out", error.outcome.ranks[0].seconds)
        if done.code == 0:
            return Verdict(False, "every test passed", done.seconds)
        if "no match in any of" in done.stderr + done.stdout and any("::" in test for test in chosen):
            # A test was renamed after the tests were selected, or the change itself renames one.
            return self.run_tests(list(dict.fromkeys(test.partition("::")[0] for test in chosen)), timeout)
        if done.code == pytest.ExitCode.NO_TESTS_COLLECTED:
            return Verdict(False, "no test was selected", done.seconds)
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
        if done.code == pytest.ExitCode.TESTS_FAILED and failed:
            return Verdict(True, failed[1], done.seconds)
        reason = failed[1] if failed else (done.stdout + done.stderr).strip().rpartition("\n")[2]
        return Verdict(True, f"exit status {done.code}: {reason}", done.seconds)


@contextlib.contextmanager
def workspace(prefix: str) -> Iterator[Path]:
    """Create a temporary folder for trees, in memory if possible."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as folder:
        yield Path(folder)


@contextlib.contextmanager
def offline_runs(prefix: str) -> Iterator[tuple[RankServer, Path]]:
    """Provide a rank server and a folder for runs that use no network and have a cache of rows of their own."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    server = RankServer()
    with workspace(prefix) as folder:
        os.environ.setdefault("HF_DATASETS_CACHE", str(folder / "cache"))
        try:
            yield server, folder
        finally:
            server.close()


def tried(
    items: Iterable[Item], attempt: Callable[[Item, Tree], Verdict], jobs: int
) -> Iterator[tuple[Item, Verdict]]:
    """Attempt every item, ``jobs`` at a time, each in a separate tree; yield the verdicts as they are made."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as in tests/conftest.py: a library of the server imports triton
    server, free = RankServer(), queue.SimpleQueue[Tree]()

    def one(item: Item) -> tuple[Item, Verdict]:
        tree = free.get()
        try:
            return item, attempt(item, tree)
        finally:
            free.put(tree)

    with workspace("trials-") as place:
        pool = ThreadPoolExecutor(jobs)
        try:
            for number in range(jobs):
                free.put(Tree(place / str(number), server))
            for done in as_completed([pool.submit(one, item) for item in items]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)
            server.close()


def reported(verdicts: Iterable[tuple[object, Verdict]]) -> int:
    """Print each verdict as it is made, and then what was not detected; return the exit status."""
    missed, detected = list[str](), 0
    for item, verdict in verdicts:
        detected += verdict.noticed
        missed += [] if verdict.noticed else [str(item)]
        sign = "detected" if verdict.noticed else "SURVIVED"
        print(f"{sign} {verdict.seconds:5.1f} s  {item}  [{verdict.how}]", flush=True)
    print("\n  not: ".join([f"{detected} of {detected + len(missed)} detected", *missed]))
    return int(bool(missed) or not detected)


if __name__ == "__main__":  # run pytest in a forked process as in a new one, which is not a rank
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    sys.path.remove(str(Path(__file__).parent))  # where tests would find tools/trl when they look for TRL
    sys.exit(pytest.main(sys.argv[1:]))
