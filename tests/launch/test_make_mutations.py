"""``make mutations`` itself, and a sample of what it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutations import main

NOTICED = """\
- name: a gradient that is added up is subtracted
  file: alignment/objectives/likelihood.py
  original: return -chosen_logps.sum(),
  replacement: return chosen_logps.sum(),
  tests: [tests/unit/test_objectives.py -k nll]
"""
MISSED = """\
- name: a docstring has another ending
  file: alignment/objectives/likelihood.py
  original: from torch import Tensor
  replacement: from torch import Tensor  # and nothing else
  tests: [tests/unit/test_objectives.py -k nll]
- name: a test is named that does not exist
  file: alignment/objectives/likelihood.py
  original: from torch import Tensor
  replacement: from torch import Tensor  # and nothing more
  tests: [tests/unit/test_objectives.py -k no_test_has_this_name]
- name: the file cannot be imported
  file: alignment/objectives/likelihood.py
  original: from torch import Tensor
  replacement: from torch import NoSuchName
  tests: [tests/unit/test_objectives.py -k nll]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
def test_a_surviving_mutation_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "area.yaml").write_text(NOTICED + MISSED)
    assert main(["--folder", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "1 of 4 mutations detected" in out and "detected " in out
    for name, why in {
        "a docstring has another ending": "every test passed",
        "a test is named that does not exist": "no test was selected",
        "the file cannot be imported": "exit status",
    }.items():
        line = next(line for line in out.splitlines() if line.startswith("SURVIVED") and name in line)
        assert why in line and f"not: area: {name}" in out


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
def test_a_sample_of_the_mutations_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sample", "10"]) == 0, capsys.readouterr().out
