"""``make mutations`` itself, and a sample of what it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tools.mutations import main
from tools.trial import Verdict

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
        assert why in line and f"not: {name}" in out


class ScriptedTree:
    """A tree in which tests called ``broken`` always fail, and all others only on mutated code."""

    runs: list[tuple[str, bool]] = []

    def __init__(self, folder: Path) -> None:
        self.mutated = False

    @contextlib.contextmanager
    def changed(self, file: str, text: str) -> Iterator[None]:
        self.mutated = True
        yield
        self.mutated = False

    def run_tests(self, server: object, chosen: Sequence[str], timeout: float) -> Verdict:
        self.runs.append((" ".join(chosen), self.mutated))
        return Verdict(self.mutated or chosen[0] == "broken", f"{chosen[0]}::test", 0.5)


def test_a_test_that_fails_without_the_mutation_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = NOTICED.replace("a gradient", "{} gradient").replace("[tests/unit/test_objectives.py -k nll]", "{}")
    tests = {
        "one": "[broken -k x]",
        "another": "[broken -k x]",
        "a good": "[good -k y, broken]",
        "a like": "[good -k y]",
    }
    (tmp_path / "area.yaml").write_text("".join(entry.format(name, chosen) for name, chosen in tests.items()))
    monkeypatch.setattr("tools.mutations.Tree", ScriptedTree)
    monkeypatch.setattr("tools.mutations.trials", lambda prefix, jobs: contextlib.nullcontext(([tmp_path], None)))
    monkeypatch.setattr(ScriptedTree, "runs", [])
    assert main(["--folder", str(tmp_path), "--jobs", "1"]) == 1
    out = capsys.readouterr().out
    assert "2 of 4 mutations detected" in out and out.count("[fails without the mutation: broken::test]") == 2
    # On the unmodified code, each command ran once.
    assert sorted(chosen for chosen, mutated in ScriptedTree.runs if not mutated) == ["broken -k x", "good -k y"]


@pytest.mark.slow
@pytest.mark.usefixtures("launch")
def test_a_sample_of_the_mutations_is_detected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sample", "10"]) == 0, capsys.readouterr().out
