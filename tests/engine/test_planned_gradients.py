"""What a run takes for occupied as it plans its gradients: the same at its start and after a resume."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from helpers import make_model, options, unpaired_rows

from alignment import KTOConfig, KTOTrainer
from alignment.training import run_engines

pytestmark = pytest.mark.ci


class Planned(Exception):
    """Ends a run once it has planned."""


@pytest.mark.parametrize(("placement", "counted"), [("replica", 20), ("precomputed", 10)])
def test_only_a_reference_that_stays_is_counted(
    placement: str, counted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is only asked before training is gone, and with its answers kept it is not even loaded."""
    in_use, others = iter((10, 20)), []

    def planned(model: Any, other: int) -> Any:
        others.append(other)
        raise Planned

    monkeypatch.setattr(run_engines, "bytes_in_use", lambda: next(in_use))
    monkeypatch.setattr(run_engines, "sizes_of", planned)
    args = KTOConfig(**options(tmp_path, ref_placement=placement, max_steps=1))
    trainer = KTOTrainer(model=make_model(tmp_path / "model"), args=args, train_dataset=unpaired_rows(16))
    with contextlib.closing(trainer), pytest.raises(Planned):
        trainer.train()
    assert others == [counted]


@pytest.mark.parametrize(("cut", "most"), [(None, 1), (200, 4)])
def test_a_window_that_is_cut_by_tokens_has_several_micro_batches(
    cut: int | None, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is one batch without that; its gradients are summed like any others."""
    found = []

    def planned(sizes: Any, dtypes: Any, at: Any) -> Any:
        found.append(at.micro_batches)
        raise Planned

    monkeypatch.setattr(run_engines, "plan_gradients", planned)
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_tokens_per_batch": cut}
    args = KTOConfig(**options(tmp_path, ref_placement="replica", max_steps=1, **given))
    trainer = KTOTrainer(model=make_model(tmp_path / "model"), args=args, train_dataset=unpaired_rows(16))
    with contextlib.closing(trainer), pytest.raises(Planned):
        trainer.train()
    assert found == [most]


def test_the_optimizer_s_own_states_are_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three fp32 numbers for each weight of AdEMAMix, two of AdamW."""
    found = []

    def planned(sizes: Any, dtypes: Any, at: Any) -> Any:
        found.append(at.states)
        raise Planned

    monkeypatch.setattr(run_engines, "plan_gradients", planned)
    model = make_model(tmp_path / "model")
    for optim in ("adamw_torch", "ademamix"):
        args = KTOConfig(**options(tmp_path / optim, ref_placement="replica", max_steps=1, optim=optim))
        trainer = KTOTrainer(model=model, args=args, train_dataset=unpaired_rows(16))
        with contextlib.closing(trainer), pytest.raises(Planned):
            trainer.train()
    assert found == [8, 12]
