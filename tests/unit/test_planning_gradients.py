"""The plan of gradient accumulation, made from sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.helpers import STAGES
from torch import nn

from alignment.config.dtypes import DtypePlan, plan_dtypes
from alignment.engines.launch_env import init_distributed
from alignment.methods.kto_options import KTOConfig
from alignment.planning import gradients
from alignment.planning.gradients import Situation, Sizes, plan_gradients

N = 1_000_000
BF16 = DtypePlan("bfloat16", "float32", "bfloat16", accumulation_is_free=True)
FP32 = DtypePlan("float32", "float32", "float32", accumulation_is_free=True)
TWO = Situation(2, 2, 4)
EIGHT, OFFLOADED = replace(TWO, ranks=8), replace(TWO, offloaded=True)
MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def sizes(capacity: float, trained: int = N, others: int = 0) -> Sizes:
    """Return the sizes of a model with N parameters in bf16; ``capacity`` is in bytes per parameter."""
    return Sizes(2 * N, trained, others, int(capacity * N))


def chosen(at: Situation, room: float, dtypes: DtypePlan = BF16, **more: int) -> tuple[str, bool, float]:
    """Return dtype, whether reduced once, and bytes per parameter, for a memory limit in bytes per parameter."""
    resident = gradients._resident(sizes(0, **more), at) / N
    plan = plan_gradients(sizes((resident + room) / 0.75, **more), dtypes, at)
    return plan.accumulate, plan.once, plan.device_bytes / N


@pytest.mark.parametrize(
    ("at", "ladder"),
    [
        (TWO, [(8.1, "float32", True, 8), (7.9, "float32", False, 2), (1.9, "bfloat16", False, 1)]),
        (EIGHT, [(6.6, "float32", True, 6.5), (6.4, "float32", False, 0.5), (0.1, "bfloat16", False, 0.25)]),
        (Situation(2, 1, 4), [(4.1, "float32", False, 4), (3.9, "bfloat16", False, 2), (0, "bfloat16", False, 2)]),
        (OFFLOADED, [(8.1, "float32", True, 8), (7.9, "float32", False, 2), (1.9, "bfloat16", False, 0)]),
        (Situation(2, 1, 4, offloaded=True), [(4.1, "float32", False, 4), (3.9, "bfloat16", False, 0)]),
        (Situation(3, 2, 4), [(2.1, "float32", False, 2), (1.9, "bfloat16", False, 1)]),
        (Situation(3, 2, 4, offloaded=True, weights_offloaded=True), [(99, "bfloat16", False, 0)]),
        (Situation(1, 2, 4), [(3.1, "bfloat16", True, 3), (0, "bfloat16", True, 3)]),
    ],
)
def test_the_first_plan_that_fits_is_used(at: Situation, ladder: list[tuple[float, str, bool, float]]) -> None:
    for room, *expected in ladder:
        assert chosen(at, room) == tuple(expected), room


def test_gradients_that_no_plan_avoids() -> None:
    situations = Situation(0, 2, 4), TWO, Situation(1, 2, 4), Situation(3, 1, 4)
    found = [gradients.least_bytes(N, BF16, at) / N for at in situations]
    assert found == [0, 1, 3, 2]
    assert gradients.least_bytes(N, BF16, OFFLOADED) == 0


def test_the_dtype_of_the_json_is_used() -> None:
    asked = replace(BF16, accumulation_is_free=False)
    assert chosen(TWO, 99, asked) == ("bfloat16", True, 3)
    assert chosen(TWO, 99, replace(asked, accumulate="float32")) == ("float32", True, 8)
    assert chosen(TWO, 0, replace(asked, accumulate="float32")) == ("float32", False, 2)
    assert chosen(TWO, 99, FP32) == ("float32", True, 6)


@pytest.mark.parametrize("at", [Situation(0, 2, 4), Situation(2, 2, 1)])
def test_nothing_to_choose(at: Situation) -> None:
    assert plan_gradients(sizes(99), BF16, at) is None


def test_other_memory_on_the_device_is_counted() -> None:
    """Weights, the optimizer shard and other models; the optimizer of adapters takes little."""
    at = Situation(2, 2, 4)
    assert gradients._resident(sizes(0), at) == (2 + 6) * N
    assert gradients._resident(sizes(0), replace(at, offloaded=True)) == 2 * N
    assert gradients._resident(sizes(0, others=N), Situation(3, 2, 4)) == (1 + 6 + 1) * N
    assert gradients._resident(sizes(0), Situation(3, 2, 4, True, True)) == 0
    assert gradients._resident(sizes(0, trained=1000), at) == 2 * N + 6 * 1000
    little, checked = sizes(22), replace(at, checkpointing=False)
    assert plan_gradients(little, BF16, at) == gradients.GradientPlan("float32", True, 8 * N, 2)
    assert plan_gradients(little, BF16, checked) == gradients.GradientPlan("float32", False, 2 * N, 2)


def test_sizes_are_those_of_the_rank_with_the_least_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    init_distributed(use_cpu=True)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7, dtype=torch.bfloat16))
    model[1].requires_grad_(False)
    monkeypatch.setattr(gradients, "gathered", lambda own: [own, (70, 20), (60, 40)])
    monkeypatch.setattr(gradients, "total_bytes", lambda where: 100)
    assert gradients.sizes_of(model, 10) == Sizes(20 * 4 + 42 * 2, 20, 40, 100)


def test_memory_in_use_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    init_distributed(use_cpu=True)
    assert gradients.bytes_in_use() == 0
    monkeypatch.setattr(gradients, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7)
    assert gradients.bytes_in_use() == 7


def test_the_situation_is_read_from_the_json() -> None:
    assert gradients.situation_of(STAGES["stage3-offload"], 2, 4, True) == Situation(3, 2, 4, True, True, True)
    assert gradients.situation_of(STAGES["stage2-offload"], 1, 3, False) == Situation(2, 1, 3, True, False, False)


@pytest.mark.parametrize(
    ("ds", "options", "free"),
    [
        ({}, {}, True),
        ({"data_types": {"grad_accum_dtype": "auto"}}, {}, True),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {}, False),
        ({"bf16": MASTERS}, {"learning_rate": 1e-3}, False),
    ],
)
def test_only_an_unset_dtype_is_free(ds: dict[str, object], options: dict[str, float], free: bool) -> None:
    made = plan_dtypes(KTOConfig("out", bf16=True, **options), {**STAGES["stage2"], **ds})  # type: ignore[arg-type]
    assert made.accumulation_is_free == free
