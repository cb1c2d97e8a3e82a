"""`--record`: tests that have passed with this very code are not run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import continuing

pytest_plugins = ["pytester"]
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


def test_only_what_has_not_passed_runs_again(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(test_it=TESTS)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\n")
    record = pytester.path / "deep" / "record.jsonl"
    option = ("--record", record)

    def run(*more: str | Path, broken: str | None = None, **outcomes: int) -> None:
        with monkeypatch.context() as patched:
            if broken:
                patched.setenv("BROKEN", broken)
            pytester.runpytest_inprocess(*more).assert_outcomes(**outcomes)

    # A failing call and a failing teardown are both no pass; each is run again.
    run(*option, broken="c", failed=1, passed=3, errors=1)
    passed = {json.loads(line)["test"] for line in record.read_text().splitlines()}
    assert passed == {"test_it.py::test_one", "test_it.py::test_two[a@b]"}
    with record.open("a") as file:
        file.write('{"test": "test_it.py::test_three", "co')  # as an interrupted run leaves it
    run(*option, passed=2, deselected=2)
    run(*option, deselected=4)
    record.write_text(record.read_text().replace('"code": "', '"code": "of yesterday '))
    run(*option, passed=4)
    run(passed=4)


def test_the_fingerprint_follows_code(tmp_path: Path) -> None:
    (tmp_path / "alignment").mkdir()
    found = [continuing.fingerprint(tmp_path)]
    for name, text in (("notes.md", "no code"), ("one.py", "a = 1"), ("one.py", "a = 2")):
        (tmp_path / "alignment" / name).write_text(text)
        found.append(continuing.fingerprint(tmp_path))
    assert found[0] == found[1] and len(set(found)) == 3
