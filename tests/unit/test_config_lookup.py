"""Functions and classes by name, from a file or a module, and the errors if they do not exist."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignment.config.errors import OptionError
from alignment.config.lookup import load_callable, raised
from alignment.objectives.likelihood import nll
from alignment.run.stop import RunStopped

FILE = '''
from __future__ import annotations
from dataclasses import dataclass
import _beside

calls = []

def length(completions, **kwargs):
    calls.append(len(completions))
    return [len(text) * _beside.FACTOR for text in completions]

def count():
    return len(calls)

@dataclass
class Scorer:
    """Looks its own module up while it is made."""

    least: int = 3

    def __call__(self, completions):
        return [len(text) >= self.least for text in completions]

class Prefers:
    def judge(self, prompts, pairs):
        return [0 for _ in pairs]

class Needs:
    def __init__(self, key):
        self.key = key

LIMIT = 3
'''

BROKEN = {"breaks": "def f(): ...\n1 / 0", "leaves": "raise SystemExit(3)"}


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "_beside.py").write_text("FACTOR = 2")
    path = tmp_path / "own.py"
    path.write_text(FILE)
    yield path
    sys.modules.pop("_beside", None)


def test_from_a_file_or_a_module(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = list(sys.path)
    length = load_callable(f"{file}:length", "reward_funcs")
    assert length(completions=["ab", "c"]) == [4, 2]
    assert sys.path == paths
    assert "own" not in sys.modules and sys.modules[length.__module__].__file__ == str(file)
    assert not list(file.parent.rglob("own*.pyc"))
    assert load_callable(f"{file}:Scorer", "reward_funcs")(["abc", "a"]) == [True, False]
    # The same module, whatever way its path is written.
    monkeypatch.chdir(file.parent)
    assert load_callable("own.py:count", "reward_funcs")() == 1
    # And the new one once it is edited, as in a notebook.
    file.write_text(FILE.replace("_beside.FACTOR", "10"))
    assert load_callable(f"{file}:length", "reward_funcs")(["ab"]) == [20]
    assert load_callable("alignment.objectives.likelihood:nll", "reward_funcs") is nll


def test_two_files_of_one_name(file: Path) -> None:
    other = file.parent / "other" / "own.py"
    other.parent.mkdir()
    other.write_text(FILE)  # the same text elsewhere is another module: it may read what lies beside it
    functions = [load_callable(f"{path}:length", "reward_funcs") for path in (file, other)]
    assert [function.__globals__["__file__"] for function in functions] == [str(file), str(other)]


def test_a_judge_is_an_object_with_that_method(file: Path) -> None:
    judge = load_callable(f"{file}:Prefers", "judge", method="judge")
    assert judge.judge(["p"], [["a", "b"]]) == [0]
    with pytest.raises(OptionError, match="expected a function or class"):
        load_callable(f"{file}:Prefers", "reward_funcs")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("length", ": expected file.py:name or package.module:name"),
        ("{folder}/none.py:f", "/none.py: No such file or directory; check the path"),
        ("{folder}/own.py:lenght", "/own.py does not define 'lenght'; did you mean 'length'?"),
        ("{folder}/own.py:LIMIT", ": LIMIT is 3 (an integer); expected a function or class"),
        ("{folder}/own.py:Needs", "Needs() raised TypeError: "),
        ("{folder}/breaks.py:f", " raised ZeroDivisionError: division by zero (breaks.py, line 2)"),
        ("{folder}/leaves.py:f", ": importing leaves.py raised SystemExit: 3 (leaves.py, line 1)"),
        ("nowhere.module:f", ": importing nowhere.module raised ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_what_cannot_be_loaded(given: str, said: str, file: Path) -> None:
    folder = file.parent
    for name, text in BROKEN.items():
        (folder / f"{name}.py").write_text(f"{text}\n")
    paths, modules = list(sys.path), set(sys.modules)
    given = given.format(folder=folder)
    with pytest.raises(OptionError) as caught:
        load_callable(given, "reward_funcs")
    message = str(caught.value)
    assert message.startswith("reward_funcs='") and said in message and "\n" not in message
    assert sys.path == paths
    assert "own.py" in given or not {name for name in set(sys.modules) - modules if name.startswith("_alignment_")}


def test_a_stop_request_is_not_an_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "asked.py"
    path.write_text("from alignment.run.stop import *\nraise RunStopped(StopReason.SIGTERM, 'x')\n")
    with pytest.raises(RunStopped):
        load_callable(f"{path}:f", "reward_funcs")


def test_long_errors_of_a_users_code_are_shortened() -> None:
    assert raised(KeyError("x")) == "KeyError: 'x'"
    assert raised(ValueError("a" * 301)) == f"ValueError: {'a' * 299}…"
