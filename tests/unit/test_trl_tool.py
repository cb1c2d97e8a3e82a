"""`python -m tools.trl`: its list of failing tests, its package `trl`, and a run with a miniature checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.trl import __main__ as command
from tools.trl import checkouts, shim
from tools.trl.hub import rows
from tools.trl.reasons import EXPECTED, Line, Outcome, Reason, by_reason, problems, read, table, updated, write

_ENTRIES = {
    "0.9.0/test_kto_trainer.py::test_a": Line(Reason.GPU),
    "0.9.0/test_kto_trainer.py::test_b[x | y]": Line(None, "ValueError: no"),
    "0.24.0/test_cpo_trainer.py::T::test_c": Line(Reason.UNSUPPORTED, "encoders | decoders"),
}


def test_file_is_read_as_written() -> None:
    entries = {**_ENTRIES, "0.9.0/test_kto_trainer.py::test_b[x | y]": Line(Reason.OPEN)}
    entries = {name.replace(" | ", "-"): line for name, line in entries.items()}
    assert read(write(entries)) == entries


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[0.9/f]\ntest_a | NOTHING\n", "NOTHING is not one of VISION"),
        ("[0.9/f]\ntest_a | GPU\ntest_a | SLOW\n", "line 3: 0.9/f::test_a occurs twice"),
        ("test_a | GPU\n", "below a"),
        ("[0.9/f]\ntest_a\n", "expected `test"),
    ],
)
def test_file_with_a_mistake_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(text)


def test_file_is_strict() -> None:
    passed, failed = Outcome(True), Outcome(False, None, "ValueError: no")
    entries = {"0.9/f::a": Line(Reason.GPU), "0.9/f::b": Line(Reason.GPU), "0.9/f::d": Line(None, "?")}
    outcomes = {"0.9/f::a": passed, "0.9/f::b": failed, "0.9/f::c": failed, "0.9/f::d": failed, "0.9/f::e": passed}
    assert problems(outcomes, entries) == [
        "0.9/f::a passes: remove its line",
        "0.9/f::c does not pass, but is not in the file: ValueError: no",
        "0.9/f::d has no reason: ?",
    ]
    assert problems({"0.9/f::b": failed}, entries) == []  # a test that did not run is not a problem


def test_update_keeps_manually_set_reasons() -> None:
    entries = {
        "0.10/f::gone": Line(Reason.GPU),
        "0.9/f::kept": Line(Reason.DIFFERENT, "why"),
        "0.9/f::other": Line(None),
    }
    outcomes = {
        "0.10/f::gone": Outcome(True),
        "0.9/f::kept": Outcome(False, None, "now another error"),
        "0.9/f::new": Outcome(False, None, "ValueError: a | b"),
        "0.9/f::marked": Outcome(False, Reason.VLLM, "skipped by its markers"),
    }
    assert updated(outcomes, entries) == {
        "0.9/f::kept": Line(Reason.DIFFERENT, "why"),
        "0.9/f::marked": Line(Reason.VLLM),
        "0.9/f::new": Line(None, "ValueError: a / b"),
        "0.9/f::other": Line(None),
    }


def test_table_counts_runnable_tests() -> None:
    entries = {"0.9/f::b": Line(Reason.UNSUPPORTED), "0.9/f::c": Line(Reason.GPU)}
    failed = Outcome(False, None, "no")
    outcomes = {"0.9/f::a": Outcome(True), "0.9/f::b": failed, "0.9/f::c": failed, "0.10/g::a": Outcome(True)}
    assert table(outcomes, entries)[2:] == [
        "| 0.9 | f | 3 | 2 | 1 |",
        "| 0.10 | g | 1 | 1 | 1 |",
        "| all |  | 4 | 3 | 2 |",
    ]
    assert by_reason(outcomes, entries)[2:] == [
        f"| UNSUPPORTED | 1 | {Reason.UNSUPPORTED.value} |",
        f"| GPU | 1 | {Reason.GPU.value} |",
    ]


def test_committed_file_is_complete() -> None:
    """Every line has a reason, and manually set reasons also have a remark."""
    entries = read(EXPECTED.read_text(encoding="utf-8"))
    chosen = (Reason.DIFFERENT, Reason.UNSUPPORTED, Reason.OPEN)
    assert [name for name, line in entries.items() if line.reason is None] == []
    assert [name for name, line in entries.items() if line.reason in chosen and not line.remark] == []


def test_rows_have_equal_columns() -> None:
    for configs in (rows.zen(), rows.harmony(), rows.toolcall(), {"": rows.reviews()}):
        for name, columns in configs.items():
            assert len({len(column) for column in columns.values()}) == 1, name
    assert len(rows.zen()) == 12


def _checkout(folder: Path) -> Path:
    """A miniature of TRL: two trainers with empty tests, and one file with every kind of outcome."""
    for name in ("tests", "trl/trainer"):
        (folder / name).mkdir(parents=True)
    (folder / "VERSION").write_text("0.99.0\n")
    for name in ("trl/__init__.py", "trl/trainer/__init__.py", "trl/trainer/kto_trainer.py", "tests/__init__.py"):
        (folder / name).touch()
    (folder / "tests" / "testing_utils.py").write_text(
        "import pytest\nfrom trl import OnlyInTrl\nfrom trl.import_utils import is_vllm_available\n"
        "class Derived(OnlyInTrl):\n    pass\n"
        "require_vision = pytest.mark.skipif(False, reason='test requires vision')\n"
        "require_more = pytest.mark.skipif(True, reason='needs a newer release')\n"
    )
    (folder / "trl" / "import_utils.py").touch()
    for name in ("cpo", "online_dpo", "reward"):
        (folder / "tests" / f"test_{name}_trainer.py").write_text("def test_nothing():\n    pass\n")
    (folder / "tests" / "test_kto_trainer.py").write_text(_TESTS)
    return folder


_TESTS = """
import os, time
import pytest
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig
from trl.trainer.kto_trainer import KTOConfig as Same, _helper
from .testing_utils import Derived, is_vllm_available, require_more, require_vision

NAME = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"

def test_names():
    import alignment
    assert KTOConfig is Same is alignment.KTOConfig

def test_hub(tmp_path):
    config = "standard_unpaired_preference"
    rows = load_dataset("trl-internal-testing/zen", config)
    stream = load_dataset("trl-internal-testing/zen", config, split="test", streaming=True)
    assert [len(rows["train"]), len(rows["test"]), len(list(stream))] == [17, 2, 2]
    tokenizer, model = AutoTokenizer.from_pretrained(NAME), AutoModelForCausalLM.from_pretrained(NAME)
    ids = tokenizer(rows["train"]["prompt"][:2], padding=True, return_tensors="pt")
    assert model(**ids).logits.isfinite().all()
    assert not list(tmp_path.iterdir()) and not os.listdir(".")

def test_fails():
    assert 1 == 2, "one is not two"

def test_uses_helper():
    with pytest.raises(ValueError):
        _helper([1])

def test_uses_class():
    Derived()

@pytest.mark.slow
def test_slow():
    raise AssertionError

@require_vision
def test_vision():
    raise AssertionError

@require_more
def test_skipped():
    raise AssertionError

def test_hangs():
    time.sleep(1000)

def test_dies():
    os._exit(3)

def test_state_is_its_own():
    assert "LEFT" not in os.environ
    os.environ["LEFT"] = "x"

def test_state_is_its_own_too():
    test_state_is_its_own()
"""


def test_release_and_files(tmp_path: Path) -> None:
    folder = _checkout(tmp_path / "trl")
    assert checkouts.release(folder) == "0.99.0"
    assert [file.name for file in checkouts.files(folder)] == [
        f"test_{name}_trainer.py" for name in ("kto", "cpo", "online_dpo", "reward")
    ]
    (folder / "VERSION").write_text("1.99.0.dev0")
    with pytest.raises(ValueError, match="no test_sft_trainer.py"):
        checkouts.files(folder)
    assert shim.modules(folder) == {"trl", "trl.trainer", "trl.trainer.kto_trainer", "trl.import_utils"}
    with pytest.raises(ValueError, match="not a checkout of TRL"):
        checkouts.release(tmp_path)


@pytest.mark.slow
def test_miniature_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    from tools.trl.hub import models

    monkeypatch.setattr(models, "MODELS", models.MODELS[:1])
    monkeypatch.setattr(command, "_installed", lambda package: True)  # parameterized is not used in this test
    folder, expected, record = _checkout(tmp_path / "trl"), tmp_path / "expected.txt", tmp_path / "record.jsonl"
    arguments = [str(folder), "--limit=3", f"--expected={expected}", f"--record={record}"]
    arguments += [f"--failures={tmp_path / 'failures'}", f"--hub={tmp_path / 'hub'}"]
    assert command.main([*arguments, "--update"]) == 1  # three have no reason yet
    entries = {name.partition("::")[2]: line for name, line in read(expected.read_text()).items()}
    assert {name: line.reason for name, line in entries.items()} == {
        "test_dies": None,
        "test_fails": None,
        "test_hangs": None,
        "test_skipped": Reason.SKIPPED,
        "test_slow": Reason.SLOW,
        "test_uses_class": Reason.PRIVATE,
        "test_uses_helper": Reason.PRIVATE,
        "test_vision": Reason.VISION,
    }
    assert "one is not two" in entries["test_fails"].remark
    assert entries["test_hangs"].remark == "timed out after 3 s"
    assert "| all |  | 15 | 10 | 7 |" in capsys.readouterr().out
    assert "one is not two" in next((tmp_path / "failures").glob("*test_fails.txt")).read_text()
    # The second call runs nothing, because all outcomes are recorded. With reasons, the file is correct.
    expected.write_text(expected.read_text().replace(" | ? | ", " | OPEN | "))
    before = record.read_text()
    monkeypatch.setattr(command, "prepare", lambda folder: tmp_path)
    assert command.main(arguments) == 0
    assert record.read_text() == before and len(before.splitlines()) == 15
    # A test that passes now is a problem until its line is removed.
    lines = [json.loads(line) for line in before.splitlines()]
    for line in lines:
        line |= {"passed": True} if line["test"].endswith("test_fails") else {}
    record.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert command.main(arguments) == 1
    assert "test_fails passes: remove its line" in capsys.readouterr().out
