"""pytest plugin for coverage runs: write the duration of each test as JSON to the file TEST_TIMES."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from tools.mutants.covered import without_group
from tools.ranks.process import COVERAGE

_SECONDS: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up setup, call and teardown."""
    _SECONDS[without_group(report.nodeid)] += report.duration


def pytest_configure() -> None:
    """Measure the Python processes started by tests as well (coverage.py installs the hook)."""
    os.environ["COVERAGE_PROCESS_START"] = os.environ[COVERAGE]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the times, only in pytest-xdist's controller process."""
    if not hasattr(session.config, "workerinput"):
        Path(os.environ["TEST_TIMES"]).write_text(json.dumps(_SECONDS))
