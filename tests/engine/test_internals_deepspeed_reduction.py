"""Assumptions of `alignment.internals.deepspeed_reduction`, with real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.fragment_runs import Case, differences, engine, everything

from alignment.data.batching import collate
from alignment.engines.scoring import PolicyEngine
from alignment.internals import deepspeed_reduction as internals

pytestmark = pytest.mark.usefixtures("one_rank")


def backward(policy: PolicyEngine, number: int, *, last: bool) -> None:
    batch = collate([([2, 3, 4 + number], [5, 6])], 20)
    policy.backward(policy.forward(batch).scores.sum(), last=last)


@pytest.mark.parametrize(("kind", "can"), [("stage0", False), ("stage2", True), ("stage3", False)])
def test_only_stages_1_and_2_hold_back(kind: str, can: bool, tmp_path: Path) -> None:
    policy = engine(Case(kind), tmp_path, reduce_once=True)
    assert policy.reduces_once == internals.can_reduce_once(policy.engine) == can
    backward(policy, 0, last=False)
    backward(policy, 1, last=True)
    assert policy.step() > 0
    if can:
        internals.hold_back(policy.engine)
        backward(policy, 2, last=False)
        internals.reduce_held(policy.engine)
        assert policy.step() > 0
    policy.close()


def test_sums_are_in_the_accumulation_dtype(tmp_path: Path) -> None:
    policy = engine(Case("stage2-fp32-accumulation", "bf16"), tmp_path, reduce_once=True)
    internals.accumulate_locally(policy.engine)  # as the engine's own class has done; a second call has no effect
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
    internals.hold_back(policy.engine)
    backward(policy, 5, last=False)
    internals.let_go(policy.engine)
    policy.discard()
    for one in (policy, plain):
        backward(one, 0, last=False)
        backward(one, 1, last=True)
        one.step()
    assert differences(everything(policy), everything(plain)) == []
    policy.close(), plain.close()
