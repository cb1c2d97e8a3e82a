"""`python -m tools.trl`: what is expected of TRL's own tests, its package `trl`, and the commands of its scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.trl import __main__ as command
from tools.trl import scripts


def test_failures_are_compared_with_the_file() -> None:
    outcomes = {"0.9/f.py::a[x]": "no", "0.9/f.py::b": "passed", "0.9/f.py::c": "skipped", "0.9/f.py::d": "why"}
    expected = command.read("# a comment\n*/f.py::a[x] | reason\n*::b | stale\n")
    assert list(command.problems(outcomes, expected, everything=True)) == [
        "0.9/f.py::d fails, which is not expected: why",
        "*::b matches no test that fails: remove it",
    ]


SCRIPT = '''"""
python kto.py --dataset_name rows --model_name_or_path=m \\
    --report_to wandb --packing --use_peft --push_to_hub
"""
from trl.scripts.utils import get_dataset
from trl import KTOTrainer
'''


def test_commands_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "trl" / "scripts").mkdir(parents=True)
    (tmp_path / "trl" / "scripts" / "kto.py").write_text(SCRIPT)
    (tmp_path / "VERSION").write_text("0.99.0\n")
    assert command.release(tmp_path) == "0.99.0"
    lora, plain, mixture = scripts.commands(tmp_path)
    assert (lora.label, plain.label) == ("LoRA, no `--push_to_hub`, no `--report_to`", f"{lora.label}, no `--packing`")
    assert "wandb" not in lora.arguments and "--packing" in lora.arguments and "--packing" not in plain.arguments
    assert mixture.arguments[-2] == "--config" and "--dataset_name" not in mixture.arguments
    assert scripts._IMPORT.sub(r"\1from alignment import", SCRIPT).count("from alignment import ") == 2


@pytest.mark.slow
def test_one_of_trls_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools.trl.hub import models

    monkeypatch.setattr(models, "MODELS", models.MODELS[:1])
    for name in ("tests", "trl"):
        (tmp_path / "trl" / name).mkdir(parents=True)
        (tmp_path / "trl" / name / "__init__.py").touch()
    (tmp_path / "trl" / "VERSION").write_text("0.99.0")
    text = "from trl import KTOConfig, Helper\ndef test_a():\n    KTOConfig()\n\ndef test_b():\n    Helper()\n"
    (tmp_path / "trl" / "tests" / "test_kto_trainer.py").write_text(f"{text}\ndef test_c():\n    assert 1 == 2\n")
    assert command.main([str(tmp_path / "trl"), f"--hub={tmp_path / 'hub'}", "--jobs=1", "--only", "not test_c"]) == 0
    assert command.main([str(tmp_path / "trl"), f"--hub={tmp_path / 'hub'}", "--jobs=1", "--only", "test_c"]) == 1
