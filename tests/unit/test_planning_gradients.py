"""How gradients are accumulated, chosen from the memory plan."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
from support.helpers import STAGES, zero
from transformers import LlamaConfig

from alignment.config.dtypes import DtypePlan, plan_dtypes
from alignment.methods.kto_options import KTOConfig
from alignment.models.source import ModelSource
from alignment.planning import planned_run
from alignment.planning.engines import plan_engines
from alignment.planning.gradients import GradientPlan, candidates, micro_batches
from alignment.planning.plan import Frozen
from alignment.planning.planner import Planner

pytestmark = pytest.mark.usefixtures("own_process_group")
BF16 = DtypePlan("bfloat16", "float32", "bfloat16", accumulation_is_free=True)
FP32 = DtypePlan("float32", "float32", "float32", accumulation_is_free=True)
ASKED = replace(BF16, accumulation_is_free=False)
MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 512}
MODEL = ModelSource("model", None, LlamaConfig(num_attention_heads=8, **SIZES), {})


@functools.cache
def counted() -> Planner:
    """Return the planner of a policy, whose passes are counted once."""
    args = KTOConfig("out", bf16=True, use_cpu=True, max_length=2048, gradient_accumulation_steps=2)
    engines = plan_engines(args, MODEL, None)
    return Planner(args, replace(engines, dtypes=BF16), 1)


def planner(config: dict[str, Any], ranks: int = 2, **more: Any) -> Planner:
    base = counted()
    return replace(base, engines=replace(base.engines, policy=config), ranks=ranks, **more)


def needed(planned: Planner) -> int:
    """Return the bytes on a GPU that training needs, with the reserve."""
    return max(planned.plan().peak(phase, reserve=True) for phase in ("train", "step"))


@pytest.mark.parametrize(
    ("config", "ranks", "ladder"),
    [
        (zero(2), 4, [("float32", True, 6), ("float32", False, 1)]),
        (zero(2), 8, [("float32", True, 6), ("float32", False, 0.5)]),
        (zero(2), 1, [("float32", False, 4)]),
        (zero(2, optimizer=True), 2, [("float32", True, 6), ("float32", False, 2), ("bfloat16", False, 0)]),
        (zero(2, optimizer=True), 1, [("float32", False, 4), ("bfloat16", False, 0)]),
        (zero(3), 2, [("float32", False, 2), ("bfloat16", False, 1)]),
        (zero(3, optimizer=True, parameters=True), 2, [("bfloat16", False, 0)]),
        (zero(1), 2, [("bfloat16", True, 3)]),
    ],
)
def test_the_first_way_that_fits_is_used(
    config: dict[str, Any], ranks: int, ladder: list[tuple[str, bool, float]]
) -> None:
    """Each with the bytes per parameter that it takes on a GPU.

    At stage 2 in bf16, like the weights, the sum of earlier micro-batches and the gradients of the last one are
    separate, so that fp32 takes no more.
    """
    planned, weights = planner(config, ranks), counted().weights
    for accumulate, once, each in ladder:
        chosen = planned.gradients()
        assert (chosen.accumulate, chosen.once) == (accumulate, once)
        assert chosen.device_bytes / weights.numel == pytest.approx(each)
        enough = needed(planned)
        assert replace(planned, card=enough + 2).gradients() == chosen
        planned = replace(planned, card=enough - 1)
    assert planned.gradients() == chosen, "none fits"


def test_if_none_fits_the_one_that_needs_the_least_is_used() -> None:
    assert replace(planner(zero(3), 1), card=0).gradients(2048).accumulate == "bfloat16"


@pytest.mark.parametrize(
    ("stage", "ranks", "dtypes", "expected"),
    [
        (0, 2, BF16, []),
        (2, 2, BF16, [("float32", True), ("float32", False), ("bfloat16", True), ("bfloat16", False)]),
        (2, 2, ASKED, [("bfloat16", True), ("bfloat16", False)]),
        (2, 2, replace(ASKED, accumulate="float32"), [("float32", True), ("float32", False)]),
        (2, 2, FP32, [("float32", True), ("float32", False)]),
        (1, 1, BF16, [("bfloat16", False)]),
    ],
)
def test_candidates(stage: int, ranks: int, dtypes: DtypePlan, expected: list[tuple[str, bool]]) -> None:
    """The dtype of the JSON is used; stage 1 has one way, and without ZeRO nothing is chosen."""
    assert [(one.accumulate, one.once) for one in candidates(dtypes, stage, ranks, offloaded=False)] == expected


def test_what_else_is_on_the_gpu_counts() -> None:
    """Models that stay there, and optimizer states: AdEMAMix has three fp32 values per weight, AdamW two."""
    planned = planner(zero(2), 4)
    planned = replace(planned, card=needed(planned) + 2)
    reference = Frozen("reference", MODEL, "replica", "reference")
    assert planned.gradients().once
    for more, fits in (
        ({"rewards": (replace(reference, alone=True),)}, True),
        ({"rewards": (reference,)}, False),
        ({"options": replace(planned.options, optim="ademamix")}, False),
    ):
        assert replace(planned, **more).gradients().once == fits


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"gradient_accumulation_steps": 1}, 1),
        ({"gradient_accumulation_steps": 3}, 3),
        ({"gradient_accumulation_steps": 1, "max_tokens_per_batch": 200}, 4),
        ({"gradient_accumulation_steps": 2, "auto_find_batch_size": True}, 8),
    ],
)
def test_a_window_split_by_tokens_has_several_micro_batches(options: dict[str, Any], most: int) -> None:
    """Even if it would be one batch otherwise; its gradients are accumulated like any others."""
    args = KTOConfig("out", per_device_train_batch_size=4, max_length=64, **options)
    assert micro_batches(args) == most
    assert (replace(planner(zero(2)), options=args).gradients() is None) == (most == 1)


@pytest.mark.parametrize(("card", "accumulate"), [(math.inf, "float32"), (80e9, "bfloat16")])
def test_a_policy_of_unknown_size(card: float, accumulate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory suffices on a CPU; a GPU has the least."""
    monkeypatch.setattr(planned_run, "weights_of", lambda *_, **__: None)
    found = replace(planner(zero(2)), card=card).gradients()
    assert found == GradientPlan(accumulate, card == math.inf, 2)
    assert found.describe().startswith(f"gradients: accumulated in {accumulate}, reduced ")
    assert "device" not in found.describe() and "host" not in found.describe()


def test_the_line_at_the_start_of_a_run() -> None:
    assert GradientPlan("bfloat16", False, 1, 0).describe() == "gradients: accumulated in bfloat16, in host memory"
    assert GradientPlan("float32", False, 2, 2**29).describe() == (
        "gradients: accumulated in float32, reduced after every micro-batch, 0.50 GiB on each device"
    )


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
