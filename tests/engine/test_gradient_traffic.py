"""Gradients that two ranks sum and reduce once equal those of one rank, whichever parameters are idle."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import DRIVERS
from support.drivers.traffic import CASES
from support.fragment_runs import distance
from support.helpers import STAGES, make_model, options, paired_rows

from alignment import CPOConfig, CPOTrainer
from alignment.config.dtypes import SHORT
from alignment.training import run_engines
from tools.ranks import RankServer

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, ranks: RankServer) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("traffic")
    for world in (1, 2):
        ranks.run(DRIVERS / "traffic.py", folder, nproc=world, timeout=240)
    return {world: torch.load(folder / f"{world}.pt") for world in (1, 2)}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_update_like_one(case: str, results: dict[int, Any]) -> None:
    """Also if an expert is idle in a rank's last micro-batch, or in all of them; clipped by the same norm."""
    one, two = results[1][case], results[2][case]
    off = 1e-5 if "fp32/" in case else 2e-2
    for step, (found, wanted) in enumerate(zip(two["updates"], one["updates"], strict=True)):
        assert distance(found, wanted) < off, f"step {step}"
    expert = [name for name in one["updates"][0] if "layers.1.mlp" in name]
    assert expert and all(one["updates"][0][name].any() for name in expert), "the first micro-batch went through it"
    assert two["norms"][:4] == pytest.approx(one["norms"], rel=off)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_reduced_before_the_last_micro_batch_or_left_of_a_discarded_window(
    case: str, results: dict[int, Any]
) -> None:
    first, second, single, last = results[2][case]["calls"]
    assert {*first[:-1], *second[:-1], *last[:-1]} == {0} and min(first[-1], second[-1], last[-1]) > 0
    assert len(single) == 1 and single[0] > 0
    assert results[2][case]["discarded"]
    norms = results[2][case]["norms"]
    assert len(norms) == 5 and 0 < norms[4] < float("inf")


@pytest.mark.parametrize(("card", "accumulate"), [(None, "float32"), (1.0, "bfloat16")])
def test_a_run_reports_and_uses_the_plan_that_fits(
    card: float | None, accumulate: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU's memory is assumed to suffice: sums in fp32, as planned for two ranks; the written JSON agrees."""
    given = options(tmp_path, bf16=True, max_steps=1, deepspeed=STAGES["stage2"])
    trainer = CPOTrainer(model=make_model(tmp_path / "model"), args=CPOConfig(**given), train_dataset=paired_rows(8))
    seen = mock.patch.multiple(run_engines, world_size=lambda: 2, smallest_card=lambda: card)
    with contextlib.closing(trainer), seen:
        trainer.train()
        assert trainer.engines.policy.reduces_once
    assert (
        f"gradients: accumulated in {accumulate}, reduced once per step, 0.00 GiB on each device"
        in capsys.readouterr().out
    )
    written = json.loads((tmp_path / "out" / "deepspeed.json").read_text())
    assert written["data_types"] == {"grad_accum_dtype": SHORT[accumulate]}
