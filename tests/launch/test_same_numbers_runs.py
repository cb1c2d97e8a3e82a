"""``tools/same_numbers.py`` with real runs: equal versions are identical, and a change of one line is detected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tools.same_numbers import main
from tools.trial import Tree

WINDOWS = "alignment/data/windows.py"
OLD = "partners[order] = np.roll(order, -(shift if shift < count else 1))"
NEW = "partners[order] = np.roll(order, -(shift + 1 if shift + 1 < count else 1))"


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
def test_equal_versions_are_identical_and_a_change_of_one_line_is_detected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, names = Tree(tmp_path / "code"), ["kto-other-reference-stage3-1", "online_dpo-model-stage3-1"]
    command = [str(ROOT), str(tree.folder), "--base-python", sys.executable, "--only", *names]
    assert main(command) == 0
    assert "2 of 2 runs are identical" in capsys.readouterr().out
    text = (ROOT / WINDOWS).read_text()
    assert text.count(OLD) == 1
    with tree.changed(WINDOWS, text.replace(OLD, NEW)):  # other partners of KTO's kl
        assert main(command[:-1]) == 1
    lines: list[str] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {names[0]}: ")]
    assert any(f" (step {step}): kl: " in line for line in lines for step in (1, 2, 3)), lines
