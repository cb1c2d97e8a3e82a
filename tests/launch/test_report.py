"""The command ``report``: one run or several, and folders that have none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from run_folders import entry, start, write_log, write_status

from alignment.cli.report import main
from tools.ranks.client import environment


def outcome(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    assert isinstance(leaving.value.code, int)
    return leaving.value.code


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


def test_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert outcome(run_in(tmp_path / "one"), run_in(tmp_path / "two", "failed")) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    assert "<title>Comparison of 2 runs</title>" in Path("comparison.html").read_text()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["log.jsonl", "status.json"]


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_in(tmp_path / "one")
    assert outcome(folder, tmp_path / "none") == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: no such folder\n"
    assert outcome(tmp_path) == 1
    assert "it contains runs in one\n" in capsys.readouterr().err
    (tmp_path / "taken").mkdir()
    assert outcome(folder, "--out", tmp_path / "taken") == 1
    said = capsys.readouterr().err
    assert said == f"error: {tmp_path / 'taken'}: cannot be written: Is a directory; set --out to another file\n"
    assert sorted(os.listdir(tmp_path)) == ["one", "taken"], "nothing half written"
    assert outcome() == 2 and outcome("--help") == 0


def test_a_status_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "one")
    (folder / "status.json").write_text('{"state": "runn')
    assert outcome(folder) == 0
    assert "status.json: cannot be read" in (folder / "report.html").read_text()


def test_it_does_not_import_torch(tmp_path: Path) -> None:
    folder = run_in(tmp_path)
    code = (
        "import sys\nfrom alignment.cli.commands import main\n"
        f"try:\n    main(['report', {str(folder)!r}])\nexcept SystemExit as left:\n    assert left.code == 0\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'deepspeed') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.endswith("\n[]\n"), done.stdout + done.stderr


def test_the_script(tmp_path: Path) -> None:
    folder = run_in(tmp_path)
    command = [sys.executable, str(ROOT / "launch" / "report.py"), str(folder)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == f"{folder / 'report.html'}\n", done.stderr
