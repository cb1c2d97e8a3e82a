"""The budget of waits: at most 2 per micro-batch and 4 per step in our code, see benchmarks/host_waits.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment.engines.launch_env import init_distributed
from benchmarks import host_waits
from benchmarks.host_waits import METHODS, STAGES, maker
from benchmarks.shapes import TINY, write_model
from tools.waits.run import Share, places, shares, waits_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    init_distributed(use_cpu=True)
    folder = tmp_path_factory.mktemp("waits") / "model"
    write_model(folder, TINY)
    return str(folder)


def counted(method: str, stage: int, model: str, folder: Path) -> dict[str, Share]:
    found = waits_of(maker(method, stage, model, folder))
    print(*places(found[4]), sep="\n")
    return shares(found)


def within_budget(found: dict[str, Share]) -> None:
    assert found["ours"].micro_batch + found["transformers"].micro_batch <= 2
    assert found["ours"].step + found["transformers"].step <= 4
    # As measured; investigate an increase before updating it here.
    assert found["ours"] == Share(0, 2) and found["transformers"] == Share(0, 0)
    assert found["deepspeed"].micro_batch == 0 and found["deepspeed"].step <= 5


def test_waits_of_kto_at_stage_2(model: str, tmp_path: Path) -> None:
    within_budget(counted("KTO", 2, model, tmp_path))


@pytest.mark.ci
def test_waits_of_a_single_row(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers checks the positions of one row like those of several."""
    monkeypatch.setattr(host_waits, "_BATCH", 1)
    within_budget(counted("KTO", 3, model, tmp_path))


@pytest.mark.ci
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("method", METHODS)
def test_waits(method: str, stage: int, model: str, tmp_path: Path) -> None:
    within_budget(counted(method, stage, model, tmp_path))
