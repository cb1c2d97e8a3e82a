"""Assumptions of `alignment.internals.deepspeed_step` and `deepspeed_reduction`, with every kind of optimizer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fragment_runs import LAYERS, Case, differences, engine, everything, train

from alignment.data.batching import collate
from alignment.engines.scoring import PolicyEngine
from alignment.internals.deepspeed_reduction import (
    accumulate_locally,
    can_reduce_once,
    hold_back,
    let_go,
    reduce_held,
)
from alignment.internals.deepspeed_state import counters, dynamic_scaler, loss_scale_state
from alignment.internals.deepspeed_step import (
    discard_gradients,
    loss_scale,
    lower_loss_scale,
    scaled_where_missing,
    skip_invalid_norm,
    step_in_fp16,
)

pytestmark = pytest.mark.usefixtures("one_rank")
# Each kind of wrapper in the precisions that it handles differently, the most common ones first.
KINDS = ["stage0/fp32", "stage0/bf16", "stage1-fp32-accumulation/bf16", "stage2/bf16", "stage3/fp32"]
MORE = [
    "stage1/bf16",
    "stage2/fp32",
    "stage2-bf16-masters/bf16",
    "stage2-round-robin/fp32",
    "stage2-offload/fp32",
    "stage2-offload/bf16",
    "stage3/bf16",
    "stage3-sub-groups/bf16",
    "stage3-offload/fp32",
    "stage3-offload/bf16",
]
ALL = [*KINDS, *(pytest.param(text, marks=pytest.mark.ci) for text in MORE)]


def backward(policy: PolicyEngine, number: int, *, last: bool, factor: float = 1.0) -> None:
    batch = collate([([2, 3, 4 + number], [5, 6])], 20)
    policy.backward(policy.forward(batch).scores.sum() * factor, last=last)


def accumulate(policy: PolicyEngine, factor: float = 1.0) -> None:
    """Leave the gradient of two micro-batches in the engine, the first multiplied by ``factor``."""
    backward(policy, 0, last=False, factor=factor)
    backward(policy, 1, last=True)


def built(text: str, out: Path) -> PolicyEngine:
    policy = engine(Case.of(f"{text}/adamw_torch"), out)
    skip_invalid_norm(policy.engine)  # as the engine's own class has done; a second call has no further effect
    return policy


def check_left_alone(policy: PolicyEngine, plain: PolicyEngine) -> None:
    """Check that ``policy`` equals ``plain``, whose steps were all good, and continues in the same way."""
    assert differences(everything(policy), everything(plain)) == []
    for number in (1, 2):
        accumulate(policy), accumulate(plain)
        assert policy.step() == plain.step()
        assert train(policy, number, 1) == train(plain, number, 1)
    assert differences(everything(policy), everything(plain)) == []


@pytest.mark.parametrize("factor", [math.nan, pytest.param(math.inf, marks=pytest.mark.ci)])
@pytest.mark.parametrize("text", ALL)
def test_a_non_finite_gradient_makes_no_update(text: str, factor: float, tmp_path: Path) -> None:
    policy, plain = built(text, tmp_path), built(text, tmp_path)
    train(policy, 0, 1), train(plain, 0, 1)
    rate = policy.learning_rate
    accumulate(policy, factor)
    assert not math.isfinite(policy.step())
    assert policy.learning_rate == rate
    assert counters(policy.engine)["skipped_steps"] == 1
    check_left_alone(policy, plain)
    policy.close(), plain.close()


@pytest.mark.parametrize(
    "text",
    [*ALL, "stage0/fp16", "stage2/fp16", *(pytest.param(f"stage{n}/fp16", marks=pytest.mark.ci) for n in (1, 3))],
)
def test_a_discarded_gradient_leaves_nothing_behind(text: str, tmp_path: Path) -> None:
    policy, plain = built(text, tmp_path), built(text, tmp_path)
    accumulate(policy)
    discard_gradients(policy.engine)  # before the optimizer has any state
    train(policy, 0, 1), train(plain, 0, 1)
    before = loss_scale_state(policy.engine)
    accumulate(policy)
    discard_gradients(policy.engine)
    discard_gradients(policy.engine)  # without a single gradient
    assert loss_scale_state(policy.engine) == before
    assert counters(policy.engine)["skipped_steps"] == 3
    check_left_alone(policy, plain)
    policy.close(), plain.close()


@pytest.mark.parametrize("checked", [True, False])
def test_only_the_norm_decides_what_is_not_finite(
    checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are not scanned again, whatever the JSON requests."""
    monkeypatch.setitem(LAYERS["stage2"], "bf16", {"check_grad_overflow": checked})
    policy = built("stage2/bf16", tmp_path)
    policy.engine.optimizer.has_overflow = lambda *_: pytest.fail("the gradients were gone through")
    train(policy, 0, 1)
    accumulate(policy, math.nan)
    assert not math.isfinite(policy.step())
    assert torch.isfinite(torch.cat([w.view(-1).float() for w in everything(policy).values()])).all()
    policy.close()


FP16 = ["stage0/fp16", "stage2/fp16", pytest.param("stage3/fp16", marks=pytest.mark.ci)]


@pytest.mark.parametrize("text", FP16)
def test_in_fp16_the_norm_is_without_the_scale_and_the_scale_grows_after_the_step(text: str, tmp_path: Path) -> None:
    policy = built(text, tmp_path)
    engine, norms, scales = policy.engine, [], []
    for _ in range(4):  # the scale grows at the last of them
        scales.append(loss_scale(engine))
        (own,) = (loss_scale(engine) if "stage0" in text else 1.0 for _ in [0])
        assert float(scaled_where_missing(engine, torch.tensor(2.0))) == 2.0 * own
        accumulate(policy)
        norms.append(step_in_fp16(engine))
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0  # the weights stay as they are after the first step, and so does the gradient
    assert scales == [2.0**12] * 4 and loss_scale(engine) == 2.0**13
    assert norms[1:] == pytest.approx([norms[1]] * 3, rel=1e-3)
    policy.close()


@pytest.mark.parametrize("text", FP16)
def test_in_fp16_an_overflow_leaves_the_scale_until_it_is_lowered(text: str, tmp_path: Path) -> None:
    policy, plain = built(text, tmp_path), built(text, tmp_path)
    before = loss_scale_state(policy.engine)
    accumulate(policy, math.inf)
    assert step_in_fp16(policy.engine) is None
    assert loss_scale_state(policy.engine) == before and counters(policy.engine)["skipped_steps"] == 1
    scale = loss_scale(policy.engine)
    assert lower_loss_scale(policy.engine) and loss_scale(policy.engine) == scale / 2, "whatever the hysteresis"
    assert lower_loss_scale(policy.engine) and loss_scale(policy.engine) == scale / 4
    while loss_scale(policy.engine) > 1:
        assert lower_loss_scale(policy.engine)
    assert not lower_loss_scale(policy.engine) and loss_scale(policy.engine) == 1
    scaler = dynamic_scaler(plain.engine)
    scaler.dynamic = scaler.dynamic_loss_scale = False
    assert dynamic_scaler(plain.engine) is None and not lower_loss_scale(plain.engine)
    policy.close(), plain.close()


@pytest.mark.parametrize(("kind", "can"), [("stage0", False), ("stage2", True), ("stage3", False)])
def test_only_stages_1_and_2_hold_back(kind: str, can: bool, tmp_path: Path) -> None:
    policy = engine(Case(kind), tmp_path, reduce_once=True)
    assert policy.reduces_once == can_reduce_once(policy.engine) == can
    backward(policy, 0, last=False)
    backward(policy, 1, last=True)
    assert policy.step() > 0
    if can:
        hold_back(policy.engine)
        backward(policy, 2, last=False)
        reduce_held(policy.engine)
        assert policy.step() > 0
    policy.close()


def test_sums_are_in_the_accumulation_dtype(tmp_path: Path) -> None:
    policy = engine(Case("stage2-fp32-accumulation", "bf16"), tmp_path, reduce_once=True)
    accumulate_locally(policy.engine)  # as the engine's own class has done; a second call has no effect
    backward(policy, 0, last=False)
    backward(policy, 1, last=False)
    for parameter in policy.scorer.parameters():
        held: Any = parameter
        assert held.grad is None and held.grad_accum.dtype == torch.float32
    backward(policy, 2, last=True)
    assert policy.step() > 0
    policy.close()


def test_a_released_window_is_cleared_by_the_next_step(tmp_path: Path) -> None:
    policy, plain = (engine(Case("stage2"), tmp_path, reduce_once=True) for _ in range(2))
    hold_back(policy.engine)
    backward(policy, 5, last=False)
    let_go(policy.engine)
    policy.discard()
    for one in (policy, plain):
        backward(one, 0, last=False)
        backward(one, 1, last=True)
        one.step()
    assert differences(everything(policy), everything(plain)) == []
    policy.close(), plain.close()
