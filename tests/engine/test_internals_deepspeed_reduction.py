"""Assumptions of `alignment.internals.deepspeed_reduction`, with real engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fragment_runs import Case, differences, distance, engine, everything, masters

from alignment.data.batching import collate
from alignment.engines.launch_env import init_distributed
from alignment.engines.scoring import PolicyEngine
from alignment.internals import deepspeed_reduction as internals

KINDS = ["stage1", "stage2", "stage2-offload", "stage2-round-robin"]


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    init_distributed(use_cpu=True)
    yield


def backward(policy: PolicyEngine, number: int, *, last: bool) -> None:
    batch = collate([([2, 3, 4 + number], [5, 6])], 20)
    policy.backward(policy.forward(batch).scores.sum(), last=last)


@pytest.mark.parametrize("kind", KINDS)
def test_held_gradients_equal_those_reduced_each_time(kind: str, tmp_path: Path) -> None:
    once, each = engine(Case(kind), tmp_path), engine(Case(kind), tmp_path)
    for _ in range(2):
        internals.hold_back(once.engine)
        for number in range(3):
            backward(once, number, last=False)
            backward(each, number, last=number == 2)
        assert all(p.grad is not None for p in once.scorer.parameters()), "nothing has taken them away"
        internals.reduce_held(once.engine)
        assert once.step() == each.step()
    assert differences(everything(once), everything(each)) == []
    once.close(), each.close()


@pytest.mark.parametrize(("kind", "can"), [("stage0", False), ("stage2", True), ("stage3", False)])
def test_only_stages_1_and_2_hold_back(kind: str, can: bool, tmp_path: Path) -> None:
    policy = engine(Case(kind), tmp_path, reduce_once=True)
    assert policy.reduces_once == internals.can_reduce_once(policy.engine) == can
    backward(policy, 0, last=False)
    backward(policy, 1, last=True)
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_idle_expert_of_an_offloaded_optimizer(dtype: str, tmp_path: Path) -> None:
    """It is idle in the last micro-batch of a window, then in an entire window."""
    kinds = (
        ("stage2", "stage2-offload")
        if dtype == "fp32"
        else tuple(f"{kind}-fp32-accumulation" for kind in ("stage2", "stage2-offload"))
    )
    updates: list[list[dict[str, torch.Tensor]]] = []
    for kind in kinds:
        policy, found = engine(Case(kind, dtype, "sgd"), tmp_path), []
        expert = policy.scorer.model.model.layers[1].mlp
        forward = expert.forward
        for idle in ((False, True), (True, True)):
            before = masters(policy)
            for number, one in enumerate(idle):
                expert.forward = torch.zeros_like if one else forward
                backward(policy, number, last=number == 1)
            internals.complete_offloaded(policy.engine)  # the same
            policy.step()
            found.append({name: after - before[name] for name, after in masters(policy).items()})
        updates.append(found)
        policy.close()
    plain, offloaded = updates
    for found, wanted in zip(offloaded, plain, strict=True):
        assert distance(found, wanted) < 1e-5
