"""The command ``report``: one run or several, and folders that have none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.helpers import exit_status
from support.run_folders import entry, start, write_log, write_status

from alignment.cli.report import main


def outcome(*arguments: object) -> object:
    return exit_status(main, [str(argument) for argument in arguments])


def run_in(folder: Path, state: str = "finished") -> Path:
    write_log(folder, [{**start(), "run_name": folder.name}, entry(40, 40, 400), entry(100, 100, 1000)])
    write_status(folder, state=state)
    return folder


def test_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_in(tmp_path / "one")
    assert outcome(folder) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert "<title>one: run report</title>" in (folder / "report.html").read_text()
    assert outcome(folder, "--out", tmp_path / "new" / "x.html") == 0
    assert (tmp_path / "new" / "x.html").read_text() == (folder / "report.html").read_text()
    (folder / "status.json").write_text('{"state": "runn')  # a warning in the page
    assert outcome(folder) == 0 and "status.json: cannot be read" in (folder / "report.html").read_text()


def test_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert outcome(run_in(tmp_path / "one"), run_in(tmp_path / "two", "failed")) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    assert "<title>Comparison of 2 runs</title>" in Path("comparison.html").read_text()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["log.jsonl", "status.json"]
    compared = Path("comparison.html").read_text()
    run_in(tmp_path / "three" / "runs" / "inner")
    assert outcome(tmp_path) == outcome(tmp_path / "one", tmp_path / "three" / "runs") == 0
    both = Path("comparison.html").read_text()
    assert "<title>Comparison of 2 runs</title>" in both and str(tmp_path / "three" / "runs" / "inner") in both
    assert outcome(tmp_path) == 0 and both != Path("comparison.html").read_text() == compared


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_in(tmp_path / "one")
    (tmp_path / "taken").mkdir()
    for arguments, place in (
        ((folder, tmp_path / "none"), tmp_path / "none"),
        ((tmp_path / "taken",), tmp_path / "taken"),
        ((folder, "--out", tmp_path / "taken"), tmp_path / "taken"),
    ):
        assert outcome(*arguments) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and str(place) in error
    assert sorted(os.listdir(tmp_path)) == ["one", "taken"], "nothing half written"
    assert outcome() == 2 and outcome("--help") == 0
