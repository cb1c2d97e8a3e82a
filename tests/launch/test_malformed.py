"""A table of user errors: one line that says what and where, exit status 1, and no changes.

Each case runs in this process, so that a hundred of them take seconds.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import datasets
import pytest
import torch
from bad_case import Case
from bad_commands import command, in_folder, write_models
from malformed import TABLE
from test_bad_input import the_error, tree

from alignment.cli.train import main
from tools.ranks.client import LAUNCHER_VARIABLES

pytestmark = pytest.mark.usefixtures("own_process_group", "library_bars")
_SECONDS = 20  # a case takes less than 0.1 s; this is for one that hangs
_LONGEST = 1000  # maximum length of a line
# A sample of each kind for `make test`; all cases run in `make test-ci`.
_EVERY = {"rows": 4, "models": 4, "tokenizers": 4, "JSON": 2, "checkpoints": 3}


def parameters() -> Iterator[Any]:
    for kind, cases in TABLE.items():
        for number, case in enumerate(cases):
            marks = [] if number % _EVERY.get(kind, 1) == 0 else [pytest.mark.ci]
            name = re.sub(r"[^\w:.]+", "-", case.name)[:70]  # number of cases from which to choose
            yield pytest.param(case, id=f"{kind}-{name}", marks=marks)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of the cases."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def bounded() -> Iterator[None]:
    """Fail the test when its time is over, regardless of where it is."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still busy after {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def set_environment(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the case's variables. If it has any, remove all other launcher variables."""
    if not case.environment:
        return
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # the group of an earlier case
    for name in [*os.environ]:
        if name in LAUNCHER_VARIABLES or name.startswith(("SLURM_", "ALIGNMENT_")):
            monkeypatch.delenv(name)
    for name, value in case.environment.items():
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("case", parameters())
def test_one_line_and_no_changes(
    case: Case,
    models: Path,
    loads: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argv = command(case, tmp_path, models)
    if case.make is not None:
        case.make(tmp_path, models)
    monkeypatch.chdir(tmp_path)
    set_environment(case, monkeypatch)
    before, start = tree(tmp_path), time.monotonic()
    with pytest.raises(SystemExit) as leaving:
        importlib.import_module(case.command).main(argv)
    assert time.monotonic() - start < _SECONDS
    line = the_error(capfd.readouterr().err)
    assert leaving.value.code == 1
    for said in case.says:
        assert in_folder(said, tmp_path) in line
    assert len(line) < _LONGEST and "(this is a bug" not in line
    assert loads == []
    assert tree(tmp_path) == before


@pytest.mark.parametrize("place", ["a file", "in no folder"])
def test_a_cache_that_cannot_be_written(
    place: str,
    models: Path,
    loads: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    cache = tmp_path / "cache"
    if place == "a file":
        cache.touch()
    else:
        cache = Path("/proc/self/cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    with pytest.raises(SystemExit) as leaving:
        main(command(Case("cache", ()), tmp_path, models))
    line = the_error(capfd.readouterr().err)
    assert leaving.value.code == 1 and f"{cache}: the datasets cache cannot be written" in line
    assert "HF_DATASETS_CACHE" in line and loads == []


def test_rows_that_the_terminal_cannot_show(
    models: Path, loads: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that its encoding does not support are escaped."""
    (tmp_path / "r…ws.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as leaving:
        options = {"dry_run": "true", "dataset_name": "@r…ws.jsonl"}
        main(command(Case("odd letters", (), options), tmp_path, models))
    shown = out.buffer.getvalue().decode("latin-1")  # type: ignore[attr-defined]
    assert leaving.value.code == 0 and "r\\u2026ws.jsonl: 1 of 1 rows kept" in shown
