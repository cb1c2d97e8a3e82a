"""The objective of Online DPO against published numbers and formulas written down a second time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from alignment.config.online_dpo import ONLINE_DPO_LOSS_TYPES
from alignment.objectives.dpo import DPO_LOSS_TYPES, dpo_loss

CASES: list[dict[str, Any]] = [
    {"loss_type": "sigmoid", "beta": 0.1},
    {"loss_type": "sigmoid", "beta": 1.7},
    {"loss_type": "ipo", "beta": 0.1},
    {"loss_type": "ipo", "beta": 0.6},
]


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def inputs(pairs: int = 9) -> list[Tensor]:
    """Chosen and rejected sums of the policy, with gradient, then those of the reference."""
    noise = torch.Generator().manual_seed(6)
    reference = -40 * torch.rand(2, pairs, generator=noise, dtype=torch.float64)
    policy = reference + 4 * torch.randn(2, pairs, generator=noise, dtype=torch.float64)
    return [policy[0].clone().requires_grad_(), policy[1].clone().requires_grad_(), reference[0], reference[1]]


@pytest.mark.parametrize(("loss_type", "loss"), [("sigmoid", 0.6209570478), ("ipo", 12.25)])
def test_golden_numbers(loss_type: str, loss: float) -> None:
    found = dpo_loss(vector(-12.0), vector(-15.0), vector(-13.0), vector(-14.5), loss_type=loss_type, beta=0.1)
    assert_close(found.losses, vector(loss), rtol=0, atol=1e-9)
    assert_close(found.chosen_rewards, vector(0.1), rtol=0, atol=1e-12)
    assert_close(found.rejected_rewards, vector(-0.05), rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", CASES)
def test_losses_and_gradients_pair_by_pair(options: dict[str, Any]) -> None:
    """Against the plainest form, in Python's floats: the probability that the chosen answer wins, or IPO's square."""
    chosen, rejected, *reference = inputs()
    found = dpo_loss(chosen, rejected, *reference, **options)
    gradients = torch.autograd.grad(found.losses.sum(), (chosen, rejected))
    beta = options["beta"]
    for row, (c, r, rc, rr) in enumerate(zip(chosen.tolist(), rejected.tolist(), *(t.tolist() for t in reference))):
        gap = (c - rc) - (r - rr)
        wins = 1 / (1 + math.exp(-beta * gap))
        if options["loss_type"] == "sigmoid":
            loss, slope = -math.log(wins), -beta * (1 - wins)
        else:
            loss, slope = (gap - 0.5 / beta) ** 2, 2 * (gap - 0.5 / beta)
        assert found.losses[row].item() == pytest.approx(loss, rel=1e-12)
        assert [gradient[row].item() for gradient in gradients] == pytest.approx([slope, -slope], rel=1e-10)
        rewards = found.chosen_rewards[row].item(), found.rejected_rewards[row].item()
        assert rewards == pytest.approx((beta * (c - rc), beta * (r - rr)), rel=1e-12)
    assert not found.chosen_rewards.requires_grad and not found.rejected_rewards.requires_grad
    assert torch.autograd.gradcheck(lambda a, b: dpo_loss(a, b, *reference, **options).losses, (chosen, rejected))


@pytest.mark.parametrize("options", CASES)
def test_the_reference_has_no_gradient(options: dict[str, Any]) -> None:
    values = [value.detach().requires_grad_() for value in inputs()]
    dpo_loss(*values, **options).losses.sum().backward()
    assert [value.grad is None for value in values] == [False, False, True, True]


def test_a_policy_equal_to_its_reference() -> None:
    _, _, chosen, rejected = inputs()
    found = dpo_loss(chosen, rejected, chosen, rejected, beta=0.3)
    assert_close(found.losses, torch.full_like(chosen, math.log(2)), rtol=1e-15, atol=0)
    assert_close(found.chosen_rewards, torch.zeros_like(chosen), rtol=0, atol=0)
    found = dpo_loss(chosen, rejected, chosen, rejected, loss_type="ipo", beta=0.25)
    assert_close(found.losses, torch.full_like(chosen, 4.0), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", CASES)
def test_extremes_are_finite(options: dict[str, Any], dtype: torch.dtype) -> None:
    chosen = vector(-40000.0, -1e-4, -5000.0, dtype=dtype).requires_grad_()
    rejected = vector(-1e-4, -40000.0, -5000.0, dtype=dtype).requires_grad_()
    reference = vector(-10.0, -10.0, -40000.0, dtype=dtype), vector(-10.0, -10.0, -1e-4, dtype=dtype)
    found = dpo_loss(chosen, rejected, *reference, **options)
    for value in (*found, *torch.autograd.grad(found.losses.sum(), (chosen, rejected))):
        assert value.dtype == dtype
        assert torch.isfinite(value).all()
    if options["loss_type"] == "sigmoid":
        assert found.losses[0].item() == pytest.approx(options["beta"] * 40000, rel=1e-6)  # not log(0)


def test_no_pairs_give_an_empty_loss_with_a_graph() -> None:
    none = torch.zeros(0, requires_grad=True)
    for options in CASES:
        found = dpo_loss(none, none, none.detach(), none.detach(), **options)
        assert found.losses.shape == found.chosen_rewards.shape == (0,)
        found.losses.sum().backward()
    assert none.grad is not None


def test_other_losses_are_refused_and_options_name_the_same() -> None:
    one = vector(-1.0)
    with pytest.raises(ValueError, match="'hinge' is not one of sigmoid, ipo"):
        dpo_loss(one, one, one, one, loss_type="hinge")
    assert ONLINE_DPO_LOSS_TYPES == DPO_LOSS_TYPES
