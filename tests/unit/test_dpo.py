"""The DPO objective, offline and online, compared with published values and independently written formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from alignment.config.fields import choices_of, hints
from alignment.methods.online_dpo_options import OnlineDPOConfig
from alignment.objectives.dpo import DPO_LOSS_TYPES, dpo_loss

CASES: list[dict[str, Any]] = [
    {"loss_type": "sigmoid", "beta": 0.1},
    {"loss_type": "sigmoid", "beta": 1.7},
    {"loss_type": "ipo", "beta": 0.1},
    {"loss_type": "ipo", "beta": 0.6},
]
LENGTHS = torch.tensor([4, 1, 7, 3, 12, 5, 2, 9, 6]), torch.tensor([6, 8, 1, 3, 4, 11, 10, 2, 5])
OFFLINE: list[dict[str, Any]] = [
    {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.1},
    {"loss_type": "sigmoid", "beta": 0.6, "label_smoothing": 0.49},
    {"loss_type": "hinge", "beta": 0.1},
    {"loss_type": "hinge", "beta": 0.6},
    {"loss_type": "ipo", "beta": 0.1, "lengths": LENGTHS},
    {"loss_type": "ipo", "beta": 1.3, "lengths": LENGTHS},
]


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def inputs(pairs: int = 9) -> list[Tensor]:
    """Return chosen and rejected sums of the policy (differentiable) and of the reference."""
    noise = torch.Generator().manual_seed(6)
    reference = -40 * torch.rand(2, pairs, generator=noise, dtype=torch.float64)
    policy = reference + 4 * torch.randn(2, pairs, generator=noise, dtype=torch.float64)
    return [policy[0].clone().requires_grad_(), policy[1].clone().requires_grad_(), reference[0], reference[1]]


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, 0.6209570478),
        ({"label_smoothing": 0.1}, 0.6359570478),
        ({"loss_type": "hinge"}, 0.85),
        ({"loss_type": "ipo"}, 12.25),
        ({"loss_type": "ipo", "lengths": (torch.tensor([4]), torch.tensor([6]))}, 21.7777777778),
    ],
)
def test_golden_numbers(changes: dict[str, Any], loss: float) -> None:
    """Rewards are of complete completions regardless of the loss's use of lengths, as logged by TRL's DPOTrainer."""
    found = dpo_loss(vector(-12.0), vector(-15.0), vector(-13.0), vector(-14.5), beta=0.1, **changes)
    assert_close(found.losses, vector(loss), rtol=0, atol=1e-9)
    assert_close(found.chosen_rewards, vector(0.1), rtol=0, atol=1e-12)
    assert_close(found.rejected_rewards, vector(-0.05), rtol=0, atol=1e-12)


def plainly(options: dict[str, Any], gap: float) -> tuple[float, float]:
    """Return the loss of a margin and its derivative."""
    beta, swapped = options["beta"], options.get("label_smoothing", 0.0)
    if options["loss_type"] == "hinge":
        return max(0.0, 1 - beta * gap), -beta * (beta * gap < 1)
    if options["loss_type"] == "ipo":
        return (gap - 0.5 / beta) ** 2, 2 * (gap - 0.5 / beta)
    wins = 1 / (1 + math.exp(-beta * gap))
    return -(1 - swapped) * math.log(wins) - swapped * math.log(1 - wins), beta * (wins - (1 - swapped))


@pytest.mark.parametrize("options", CASES + OFFLINE)
def test_losses_and_gradients_pair_by_pair(options: dict[str, Any]) -> None:
    """Compare with the simplest form in Python floats."""
    chosen, rejected, *reference = inputs()
    found = dpo_loss(chosen, rejected, *reference, **options)
    gradients = torch.autograd.grad(found.losses.sum(), (chosen, rejected))
    beta, lengths = options["beta"], [side.tolist() for side in options.get("lengths", ())] or [[1] * 9] * 2
    for row, (c, r, rc, rr) in enumerate(zip(chosen.tolist(), rejected.tolist(), *(t.tolist() for t in reference))):
        tokens = lengths[0][row], lengths[1][row]
        loss, slope = plainly(options, (c - rc) / tokens[0] - (r - rr) / tokens[1])
        assert found.losses[row].item() == pytest.approx(loss, rel=1e-12)
        slopes = [slope / tokens[0], -slope / tokens[1]]
        assert [gradient[row].item() for gradient in gradients] == pytest.approx(slopes, rel=1e-10)
        rewards = found.chosen_rewards[row].item(), found.rejected_rewards[row].item()
        assert rewards == pytest.approx((beta * (c - rc), beta * (r - rr)), rel=1e-12)
    assert not found.chosen_rewards.requires_grad and not found.rejected_rewards.requires_grad
    assert torch.autograd.gradcheck(lambda a, b: dpo_loss(a, b, *reference, **options).losses, (chosen, rejected))


@pytest.mark.parametrize("options", CASES + OFFLINE)
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


@pytest.mark.parametrize("options", CASES)
def test_default_options_do_not_change_the_loss(options: dict[str, Any]) -> None:
    """Bitwise in fp32: Online DPO's losses are not affected by smoothing or lengths."""
    chosen, rejected, *reference = [value.detach().float() for value in inputs()]
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    beta, margins = options["beta"], (chosen - reference[0]) - (rejected - reference[1])
    wanted = (margins - 1 / (2 * beta)) ** 2 if options["loss_type"] == "ipo" else -F.logsigmoid(beta * margins)
    found = dpo_loss(chosen, rejected, *reference, **options)
    assert_close(found.losses, wanted, rtol=0, atol=0)
    gradients = (torch.autograd.grad(losses.sum(), (chosen, rejected)) for losses in (found.losses, wanted))
    assert_close(*gradients, rtol=0, atol=0)
    assert_close(found.rejected_rewards, beta * (rejected - reference[1]).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("loss_type", DPO_LOSS_TYPES)
def test_only_ipo_uses_lengths(loss_type: str) -> None:
    values = inputs()
    sums, means = (dpo_loss(*values, loss_type=loss_type, lengths=lengths) for lengths in (None, LENGTHS))
    assert torch.equal(sums.losses, means.losses) is (loss_type != "ipo")
    assert_close(means[1:], sums[1:], rtol=0, atol=0)


def test_smoothing_mixes_both_orders() -> None:
    chosen, rejected, *reference = inputs()
    smooth = dpo_loss(chosen, rejected, *reference, beta=0.3, label_smoothing=0.2).losses
    stated = dpo_loss(chosen, rejected, *reference, beta=0.3).losses
    swapped = dpo_loss(rejected, chosen, *reversed(reference), beta=0.3).losses
    assert_close(smooth, 0.8 * stated + 0.2 * swapped, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", CASES + OFFLINE)
def test_extremes_are_finite(options: dict[str, Any], dtype: torch.dtype) -> None:
    chosen = vector(-40000.0, -1e-4, -5000.0, dtype=dtype).requires_grad_()
    rejected = vector(-1e-4, -40000.0, -5000.0, dtype=dtype).requires_grad_()
    reference = vector(-10.0, -10.0, -40000.0, dtype=dtype), vector(-10.0, -10.0, -1e-4, dtype=dtype)
    lengths = {"lengths": (torch.tensor([9, 1, 3]), torch.tensor([1, 7, 2]))} if "lengths" in options else {}
    found = dpo_loss(chosen, rejected, *reference, **{**options, **lengths})
    for value in (*found, *torch.autograd.grad(found.losses.sum(), (chosen, rejected))):
        assert value.dtype == dtype
        assert torch.isfinite(value).all()
    if options["loss_type"] == "sigmoid":
        stated = 1 - options.get("label_smoothing", 0.0)
        assert found.losses[0].item() == pytest.approx(stated * options["beta"] * 40000, rel=1e-6)  # not log(0)


@pytest.mark.parametrize("options", CASES + OFFLINE)
def test_no_pairs_give_an_empty_differentiable_loss(options: dict[str, Any]) -> None:
    chosen, rejected, reference = (torch.zeros(0, requires_grad=own) for own in (True, True, False))
    nothing = torch.zeros(0, dtype=torch.int64)
    lengths = {"lengths": (nothing, nothing)} if "lengths" in options else {}
    found = dpo_loss(chosen, rejected, reference, reference, **{**options, **lengths})
    assert found.losses.shape == found.chosen_rewards.shape == found.rejected_rewards.shape == (0,)
    total = found.losses.sum()
    total.backward()
    assert total.item() == 0.0
    assert chosen.grad is not None and rejected.grad is not None


def test_what_is_refused() -> None:
    ones = [vector(-1.0)] * 4
    with pytest.raises(ValueError, match="'robust' is not one of sigmoid, hinge, ipo"):
        dpo_loss(*ones, loss_type="robust")
    for share in (-0.1, 0.5, 1.0, math.nan):
        with pytest.raises(ValueError, match=f"label_smoothing={share}: must be at least 0 and below 0.5"):
            dpo_loss(*ones, label_smoothing=share)
    for loss_type in ("hinge", "ipo"):
        with pytest.raises(ValueError, match=f"only applies to loss_type 'sigmoid'; set it to 0 for '{loss_type}'"):
            dpo_loss(*ones, loss_type=loss_type, label_smoothing=0.1)


def test_options_name_losses_that_exist() -> None:
    assert set(choices_of(hints(OnlineDPOConfig)["loss_type"])) <= set(DPO_LOSS_TYPES)
