"""Signals to launchers and workers of real runs: the most important cells of `make signals`.

The complete table is in ``tools/signals/expected.txt``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tools.ranks import RankServer
from tools.signals.__main__ import Signals, table
from tools.trial import workspace

pytestmark = pytest.mark.usefixtures("launch")  # to run them with the tests that start processes


@pytest.fixture(scope="module")
def signals(ranks: RankServer) -> Iterator[Signals]:
    with workspace("signals-") as folder:
        yield Signals(ranks, folder)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("torchrun launcher TERM kto", marks=pytest.mark.faults),  # a scheduler's signal, forwarded
        pytest.param("deepspeed launcher KILL kto", marks=pytest.mark.slow),  # workers without a launcher
        pytest.param("deepspeed group INT kto", marks=pytest.mark.slow),  # Ctrl-C
        pytest.param("torchrun rank1 KILL kto", marks=pytest.mark.slow),  # out of memory
        pytest.param("deepspeed rank0 KILL kto", marks=pytest.mark.slow),
    ],
)
def test_a_signal(signals: Signals, name: str) -> None:
    (cell,) = [cell for cell in table() if cell.name == name]
    problems = signals.make(cell)
    assert not problems, "\n".join(problems)
