"""Memory considered occupied when gradients are planned: the same at the start and after a resume."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from support.helpers import make_model, options, unpaired_rows

from alignment import KTOConfig, KTOTrainer
from alignment.training import run_engines

pytestmark = pytest.mark.ci


class Planned(Exception):
    """Ends a run once it has planned."""


def run_until_planned(folder: Path, **more: Any) -> None:
    args = KTOConfig(**options(folder, max_steps=1, **more))
    trainer = KTOTrainer(model=make_model(folder / "model"), args=args, train_dataset=unpaired_rows(16))
    with contextlib.closing(trainer), pytest.raises(Planned):
        trainer.train()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What gradients are planned for."""
    found: list[Any] = []

    def planned(sizes: Any, dtypes: Any, at: Any) -> Any:
        found.append(at)
        raise Planned

    monkeypatch.setattr(run_engines, "plan_gradients", planned)
    return found


@pytest.mark.parametrize(("placement", "counted"), [("replica", 20), ("precomputed", 10)])
def test_only_a_resident_reference_is_counted(
    placement: str, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A precomputed reference is released before training, or not even loaded if its store exists."""
    in_use, others = iter((10, 20)), []

    def planned(model: Any, other: int) -> Any:
        others.append(other)
        raise Planned

    monkeypatch.setattr(run_engines, "bytes_in_use", lambda: next(in_use))
    monkeypatch.setattr(run_engines, "sizes_of", planned)
    run_until_planned(tmp_path, ref_placement=placement)
    assert others == [counted]


@pytest.mark.parametrize(("cut", "most"), [(None, 1), (200, 4)])
def test_a_window_split_by_tokens_has_several_micro_batches(
    cut: int | None, most: int, tmp_path: Path, asked: list[Any]
) -> None:
    """Even if it would be one batch otherwise; its gradients are accumulated like any others."""
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_tokens_per_batch": cut}
    run_until_planned(tmp_path, ref_placement="replica", **given)
    assert [each.micro_batches for each in asked] == [most]


def test_optimizer_states_are_included_in_the_plan(tmp_path: Path, asked: list[Any]) -> None:
    """Three fp32 values per weight for AdEMAMix, two for AdamW."""
    for optim in ("adamw_torch", "ademamix"):
        run_until_planned(tmp_path / optim, ref_placement="replica", optim=optim)
    assert [each.states for each in asked] == [8, 12]
