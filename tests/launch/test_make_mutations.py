"""``make mutations``: a mutation that no test detects, and one that shows nothing, survive."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.mutations import main

ENTRY = """\
- name: {name}
  file: alignment/objectives/likelihood.py
  original: {original}
  replacement: {replacement}
  tests: [tests/unit/test_objectives.py -k {keyword}]
"""
SUM, IMPORT = "return -chosen_logps.sum(),", "from alignment.objectives.table import Loss"
MUTATIONS = (
    ("a gradient that is added up is subtracted", SUM, SUM.replace("-", ""), "nll", ""),
    ("a comment", IMPORT, f'"{IMPORT}  # and nothing else"', "nll", "every test passed"),
    ("a test that does not exist", IMPORT, f'"{IMPORT}  # nothing"', "no_test_has_this_name", "no test was selected"),
    ("the file cannot be imported", IMPORT, IMPORT.replace("Loss", "NoSuchName"), "nll", "exit status"),
)


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
def test_a_surviving_mutation_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(
        ENTRY.format(name=name, original=original, replacement=replacement, keyword=keyword)
        for name, original, replacement, keyword, _ in MUTATIONS
    )
    (tmp_path / "area.yaml").write_text(text)
    assert main(["--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1 of 4 detected" in out
    for name, *_, why in MUTATIONS[1:]:
        assert re.search(rf"^SURVIVED .*: {name}  \[{why}", out, re.MULTILINE) and f"not: area: {name}" in out, out
