"""A pytest plugin that records each failure: ``pytest -p tools.renames.failures``, with ``FAILURES`` set."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from typing import Any

import pytest

FAILURES = "ALIGNMENT_FAILURES"  # the file, one JSON object per line


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record the test, the class of the error, its text, and the files in its traceback."""
    report = yield
    error = call.excinfo
    if error is not None and report.failed:
        files = [str(entry.path) for entry in error.traceback]
        record = {"test": item.nodeid, "kind": error.typename, "text": str(error.value)[:1000], "files": files}
        with open(os.environ[FAILURES], "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return report
