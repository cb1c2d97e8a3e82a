"""`--record`: tests that have passed with this very code are not run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from support import continuing

TESTS = """
import os
import pytest

def test_one():
    assert True

@pytest.mark.parametrize("text", ["a@b", "c"])
def test_two(text):
    assert os.environ.get("BROKEN") != text

@pytest.fixture
def ends_badly():
    yield
    assert "BROKEN" not in os.environ

def test_three(ends_badly):
    pass
"""
CONFTEST = """
from support import continuing
def pytest_addoption(parser):
    continuing.add_option(parser)
def pytest_configure(config):
    continuing.register(config)
"""


def run(folder: Path, *more: str, broken: str = "") -> str:
    """The closing line of pytest over :data:`TESTS`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    environ |= {"BROKEN": broken} if broken else {}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    done = subprocess.run([*command, *more], env=environ, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[-1].partition(" in ")[0]


@pytest.mark.ci
def test_only_what_has_not_passed_runs_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    record = tmp_path / "deep" / "record.jsonl"
    option = ("--record", str(record))
    # A failing call and a failing teardown are both no pass; each is run again.
    assert run(tmp_path, *option, broken="c") == "1 failed, 3 passed, 1 error"
    assert {json.loads(line)["test"] for line in record.read_text().splitlines()} == {
        "test_it.py::test_one",
        "test_it.py::test_two[a@b]",
    }
    with record.open("a") as file:
        file.write('{"test": "test_it.py::test_three", "co')  # as an interrupted run leaves it
    assert run(tmp_path, *option) == "2 passed, 2 deselected"
    assert run(tmp_path, *option) == "4 deselected"
    record.write_text(record.read_text().replace('"code": "', '"code": "of yesterday '))
    assert run(tmp_path, *option) == "4 passed"
    assert run(tmp_path) == "4 passed"


def test_the_fingerprint_follows_code(tmp_path: Path) -> None:
    (tmp_path / "alignment").mkdir()
    found = [continuing.fingerprint(tmp_path)]
    for name, text in (("notes.md", "no code"), ("one.py", "a = 1"), ("one.py", "a = 2")):
        (tmp_path / "alignment" / name).write_text(text)
        found.append(continuing.fingerprint(tmp_path))
    assert found[0] == found[1] and len(set(found)) == 3
