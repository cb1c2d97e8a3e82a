"""`pytest --record=FILE`: continue an interrupted run with the tests that have not passed yet.

Each passed test is a line in FILE, with a fingerprint of the code. Lines with other fingerprints are ignored, so that
all tests run again after a change.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

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


def entries(file: Path) -> list[dict[str, Any]]:
    """Return the records in a file of one record per line, without a last one that an interruption has truncated."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def append(file: Path, entry: dict[str, Any]) -> None:
    """Append a record, in a new line even if the last one is truncated."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+b") as opened:
        opened.seek(max(0, opened.tell() - 1))
        torn = opened.read(1) not in (b"", b"\n")
        opened.write(b"\n" * torn + json.dumps(entry).encode() + b"\n")


def without_group(test: str) -> str:
    """Return a node ID without the group that pytest-xdist adds."""
    return re.sub(r"@[\w.-]+$", "", test)


class Recorder:
    """Deselects tests that have passed, and records tests that pass."""

    def __init__(self, config: pytest.Config) -> None:
        self.file: Path = config.getoption("--record")
        self.code = fingerprint()
        self.writes = not hasattr(config, "workerinput")  # only in pytest-xdist's controller process
        self.failed: set[str] = set()
        self.seconds: dict[str, float] = defaultdict(float)  # of setup, call and teardown

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect the tests that have passed."""
        passed = {entry["test"] for entry in entries(self.file) if entry["code"] == self.code}
        done = [item for item in items if item.nodeid in passed]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a line when a test has passed, including teardown."""
        name = without_group(report.nodeid)
        self.seconds[name] += report.duration
        if report.failed:
            self.failed.add(name)
        if self.writes and report.when == "teardown" and name not in self.failed:
            append(self.file, {"test": name, "code": self.code, "seconds": self.seconds[name]})
