"""Assumptions of `alignment.internals.process_end`, on progress bars."""

from __future__ import annotations

import io
import sys
from typing import Any
from weakref import WeakSet

import pytest
import tqdm.auto
from datasets import enable_progress_bars
from datasets.utils import tqdm as datasets_tqdm
from transformers.utils import logging as transformers_logging

from alignment.internals.process_end import open_bars


@pytest.fixture(autouse=True)
def bars_are_on(library_bars: None) -> None:
    """Enable progress bars, whatever ran before."""
    enable_progress_bars()
    transformers_logging.enable_progress_bar()


class Apart(tqdm.tqdm):  # type: ignore[type-arg]
    """A class of progress bars with its own set."""

    _instances: Any = WeakSet()


@pytest.mark.parametrize("kind", [tqdm.tqdm, tqdm.auto.tqdm, datasets_tqdm, transformers_logging.tqdm, Apart])
def test_a_bar_is_found_while_it_is_open(kind: Any) -> None:
    before, screen = len(open_bars()), io.StringIO()
    bar = kind(total=3, file=screen)
    bar.update()
    assert bar in open_bars() and not screen.getvalue().endswith("\n")
    for each in open_bars():
        each.close()
    assert screen.getvalue().endswith("\n")
    assert bar not in open_bars() and len(open_bars()) <= before


def test_without_tqdm_there_are_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    bar = tqdm.tqdm(total=1, file=io.StringIO())
    monkeypatch.delitem(sys.modules, "tqdm")
    assert open_bars() == []
    bar.close()
