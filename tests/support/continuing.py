"""`pytest --record=FILE`: continue an interrupted run with the tests that have not passed yet.

Each passed test is a line in FILE, with a fingerprint of the code. Lines with other fingerprints are ignored, so that
all tests run again after a change.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_CODE = ("alignment", "benchmarks", "ds_configs", "launch", "tests", "tools")
_SUFFIXES = (".py", ".yaml", ".json", ".txt")


def add_option(parser: pytest.Parser) -> None:
    """Add ``--record``."""
    parser.addoption("--record", type=Path, help="skip the tests recorded in FILE as passed with the current code")


def register(config: pytest.Config) -> None:
    """Register the recorder if ``--record`` is passed."""
    if config.getoption("--record") is not None:
        config.pluginmanager.register(Recorder(config), "recorder")


def fingerprint(root: Path = ROOT) -> str:
    """Return a hash of all code and test data."""
    digest = hashlib.sha256()
    files = (path for name in _CODE for path in (root / name).rglob("*") if path.suffix in _SUFFIXES)
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


class Recorder:
    """Deselects tests that have passed, and records tests that pass."""

    def __init__(self, config: pytest.Config) -> None:
        self.file: Path = config.getoption("--record")
        self.code = fingerprint()
        self.writes = not hasattr(config, "workerinput")  # only in pytest-xdist's controller process
        self.failed: set[str] = set()
        if self.writes:
            self._end_torn_line()

    def _end_torn_line(self) -> None:
        """Start a new line if an interruption has truncated the last one."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a+b") as file:
            if file.tell() and not self.file.read_bytes().endswith(b"\n"):
                file.write(b"\n")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests that have passed."""
        passed = self._passed()
        done = [item for item in items if item.nodeid in passed]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in passed]

    def _passed(self) -> set[str]:
        if not self.file.exists():
            return set()
        lines = [
            line for line in self.file.read_text().splitlines() if line.endswith("}")
        ]  # other lines are truncated
        return {entry["test"] for entry in map(json.loads, lines) if entry["code"] == self.code}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a line when a test has passed, including teardown."""
        name = re.sub(r"@[\w.-]+$", "", report.nodeid)  # remove the group that pytest-xdist adds
        if report.failed:
            self.failed.add(name)
        if self.writes and report.when == "teardown" and name not in self.failed:
            with self.file.open("a") as file:
                file.write(json.dumps({"test": name, "code": self.code}) + "\n")
