"""``make renames``: which failures count as detected."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.renames.__main__ import main

TABLE = """\
tqdm.open_bars:
  - {library: tqdm, name: _instances, test: tests/unit/test_internals_tqdm.py -k while_it_is_open}
  - {library: tqdm, name: set_postfix_str, test: tests/unit/test_internals_tqdm.py}
  - {library: tqdm, name: no_such_name, test: tests/unit/test_internals_tqdm.py}
  - {library: tqdm, name: colour, test: tests/unit/test_internals_tqdm.py -k no_test_has_this_name}
  - {library: tqdm, name: close, test: tests/unit/test_internals_tqdm.py -k without_tqdm}
"""
UNNOTICED = {
    "set_postfix_str": "every test passed",
    "no_such_name": "no file of tqdm contains it",
    "colour": "exit status 5",
    "close": "uses the name itself",
}


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
def test_an_undetected_rename_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.yaml"
    table.write_text(TABLE)
    assert main(["--table", str(table)]) == 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert any(line.startswith("detected") and "tqdm's _instances  [" in line for line in lines)
    assert "1 of 5 renames detected" in out
    for name, why in UNNOTICED.items():
        (line,) = [line for line in lines if f"tqdm's {name}  [" in line]
        assert line.startswith("MISSED") and why in line
