"""Windows with micro-batches that leave parameters without gradients, or abandoned windows: nothing older is added."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from support.fragment_runs import Case, engine, one_row

from alignment.engines.scoring import PolicyEngine
from alignment.internals.deepspeed_reduction import complete_offloaded
from alignment.internals.deepspeed_step import complete_partitioned, drop_older, forget_sums

pytestmark = pytest.mark.usefixtures("one_rank")
MICRO_BATCHES = 3
# The micro-batches of the second window in which the expert is idle; in the first window it is never idle.
IDLE = {"first": {0}, "last": {2}, "all but one": {0, 2}, "all": {0, 1, 2}}
FP32 = "stage2-offload-fp32-accumulation"


def window(policy: PolicyEngine, idle: Collection[int] = (), factor: float = 1.0, only: int = MICRO_BATCHES) -> None:
    """The backward passes of a window, or of its first part."""
    mlp = policy.scorer.model.model.layers[1].mlp
    forward = mlp.forward
    for number in range(only):
        mlp.forward = torch.zeros_like if number in idle else forward
        loss = policy.forward(one_row(number)).scores.sum() * factor / 18
        policy.backward(loss, last=number == MICRO_BATCHES - 1)
    mlp.forward = forward


def norms(case: str, out: Path) -> list[float]:
    """Norms of a window without and one with idle micro-batches, for each of :data:`IDLE`."""
    policy = engine(Case.of(case), out)
    found = []
    for idle in IDLE.values():
        for each in (set[int](), idle):
            window(policy, each)
            found.append(policy.step())
    policy.close()
    return found


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return norms("stage0/fp32/sgd", tmp_path_factory.mktemp("stage0"))


@pytest.mark.parametrize(
    "case",
    [
        "stage2-offload/fp32/sgd",
        *(
            pytest.param(case, marks=pytest.mark.ci)
            for case in ("stage2/fp32/sgd", "stage3/fp32/sgd", "stage3-offload/fp32/sgd", f"{FP32}/bf16/sgd")
        ),
    ],
)
def test_a_parameter_has_the_gradient_of_its_own_window(case: str, wanted: list[float], tmp_path: Path) -> None:
    """Whichever micro-batches it is idle in, at every stage."""
    assert norms(case, tmp_path) == pytest.approx(wanted, rel=2e-2 if "bf16" in case else 1e-5)


def after(case: str, out: Path, spoilt: str) -> tuple[float, float]:
    """The norm of a window's gradient, alone and after a window without an update."""
    alone, policy = (engine(Case.of(case), out) for _ in range(2))
    window(alone)
    expected = alone.step()
    alone.close()
    if spoilt == "discarded":
        window(policy)
        policy.discard()
    elif spoilt == "cut short":
        window(policy, only=2)
        policy.discard()
    else:
        window(policy, factor=math.inf)
        assert not math.isfinite(policy.step())
        if policy.scales_loss:
            policy.lower_loss_scale()
    window(policy)
    found = policy.step()
    policy.close()
    return found, expected


@pytest.mark.parametrize(
    ("case", "spoilt"),
    [
        (f"{FP32}/fp16/sgd", "overflown"),
        *(
            pytest.param(case, spoilt, marks=pytest.mark.ci)
            for case in (f"{FP32}/bf16/sgd", "stage2-offload/bf16/sgd", "stage2/bf16/sgd", "stage3-offload/bf16/sgd")
            for spoilt in ("discarded", "cut short")
        ),
        pytest.param("stage3/fp16/sgd", "overflown", marks=pytest.mark.ci),
    ],
)
def test_nothing_is_left_of_a_window_without_an_update(case: str, spoilt: str, tmp_path: Path) -> None:
    found, expected = after(case, tmp_path, spoilt)
    assert found == pytest.approx(expected, rel=2e-2)


def test_the_functions_do_not_change_other_optimizers(tmp_path: Path) -> None:
    policy = engine(Case("stage0"), tmp_path)
    window(policy)
    drop_older(policy.engine, several=True)
    for function in (complete_offloaded, complete_partitioned, forget_sums):
        function(policy.engine)
    assert math.isfinite(policy.step())
    policy.close()
