"""``tools/same_numbers.py`` with real runs: equal versions are identical, and a change of one line is detected."""

from __future__ import annotations

import sys

import pytest
from conftest import ROOT

from tools.same_numbers import main
from tools.trial import Tree

# Name, file, old text, new text, the run to make, and a key that must be reported.
CHANGES = {
    "a seed": (
        "alignment/training/data.py",
        "return options.seed if options.data_seed is None",
        "return options.seed + 1 if options.data_seed is None",
        "sft-stage2-1",
        "loss",
    ),
    "another KL partner": (
        "alignment/data/windows.py",
        "partners[order] = np.roll(order, -(shift if shift < count else 1))",
        "partners[order] = np.roll(order, -(shift + 1 if shift + 1 < count else 1))",
        "kto-other-reference-stage3-1",
        "kl",
    ),
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("copy") / "code")


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
def test_equal_versions_are_identical(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["kto-stage2-2", "online_dpo-model-stage3-1"]
    assert main([str(ROOT), str(tree.folder), "--base-python", sys.executable, "--only", *names]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}: 0 differences" in out for name in names) and "2 of 2 runs are identical" in out


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_line_is_detected(tree: Tree, capsys: pytest.CaptureFixture[str], change: str) -> None:
    file, old, new, run, key = CHANGES[change]
    text = (ROOT / file).read_text()
    assert text.count(old) == 1
    with tree.changed(file, text.replace(old, new)):
        assert main([str(ROOT), str(tree.folder), "--only", run]) == 1
    lines: list[str] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {run}: ")]
    assert any(f" (step {step}): {key}: " in line for line in lines for step in (1, 2, 3)), lines
    assert all(" | " in line for line in lines)
