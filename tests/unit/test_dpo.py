"""The DPO losses, offline and online, compared with published values and independently written formulas."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from support.oracle import dense
from torch import Tensor
from torch.testing import assert_close

from alignment.config.errors import OptionError
from alignment.config.fields import option
from alignment.methods.dpo_options import DPOConfig
from alignment.methods.losses import check_values
from alignment.objectives.dpo import LOSSES, ONLINE_LOSSES, dpo_loss
from alignment.objectives.pairs import PairResult
from alignment.objectives.table import NOT_NEGATIVE, Loss

CASES: list[dict[str, Any]] = [
    {"loss_type": "sigmoid", "beta": 0.1},
    {"loss_type": "sigmoid", "beta": 1.7},
    {"loss_type": "ipo", "beta": 0.1},
    {"loss_type": "ipo", "beta": 0.6},
]
LENGTHS = torch.tensor([4, 1, 7, 3, 12, 5, 2, 9, 6]), torch.tensor([6, 8, 1, 3, 4, 11, 10, 2, 5])
OPTIONS: dict[str, dict[str, float]] = {
    "sigmoid": {"label_smoothing": 0.1},
    "robust": {"label_smoothing": 0.2},
    "exo_pair": {"label_smoothing": 0.001},
    "discopop": {"discopop_tau": 0.05},
}
OFFLINE: list[dict[str, Any]] = [
    {"loss_type": name, "beta": beta, "lengths": LENGTHS, **OPTIONS.get(name, {})}
    for name in LOSSES
    for beta in (0.1, 0.6)
]
OFFLINE += [
    {"loss_type": "sigmoid", "beta": 0.6, "label_smoothing": 0.49},
    {"loss_type": "robust", "beta": 0.6, "label_smoothing": 0.0},
    {"loss_type": "exo_pair", "beta": 1.3, "label_smoothing": 0.4},
    {"loss_type": "discopop", "beta": 0.1, "discopop_tau": 1.5},
]


def loss_of(*values: Tensor, loss_type: str = "sigmoid", **options: Any) -> PairResult:
    """Return a loss by name: Online DPO's, if it has one and no lengths are given."""
    table = LOSSES if "lengths" in options or loss_type not in ONLINE_LOSSES else ONLINE_LOSSES
    return dpo_loss(*values, table[loss_type], **options)


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
        # Margin 1.5, rewards 0.1 and -0.05; means 0.25 and -1/12, so a margin of 1/3 per token.
        ({"loss_type": "sigmoid_norm", "lengths": (torch.tensor([4]), torch.tensor([6]))}, 0.6766193964),
        ({"loss_type": "robust", "label_smoothing": 0.1}, 0.6022070478),
        ({"loss_type": "exo_pair", "label_smoothing": 0.1}, 0.4313884572),
        ({"loss_type": "nca_pair"}, 1.3508248141),
        ({"loss_type": "bco_pair"}, 1.3128563081),
        ({"loss_type": "sppo_hard"}, 36.25),
        ({"loss_type": "apo_zero"}, 0.9625234160),
        ({"loss_type": "apo_down"}, 0.9875493421),
        ({"loss_type": "discopop", "discopop_tau": 0.05}, 0.8493375793),
        ({"loss_type": "sft"}, 12.0),
    ],
)
def test_golden_numbers(changes: dict[str, Any], loss: float) -> None:
    """Rewards are of complete completions regardless of the loss's use of lengths, as logged by TRL's DPOTrainer."""
    found = loss_of(vector(-12.0), vector(-15.0), vector(-13.0), vector(-14.5), beta=0.1, **changes)
    assert_close(found.losses, vector(loss), rtol=0, atol=1e-9)
    assert_close(found.chosen_rewards, vector(0.1), rtol=0, atol=1e-12)
    assert_close(found.rejected_rewards, vector(-0.05), rtol=0, atol=1e-12)


def plainly(options: dict[str, Any], values: list[Tensor]) -> Tensor:
    """Return the (P,) losses of the float64 oracle, pair by pair."""
    name, lengths = options["loss_type"], options.get("lengths")
    if name == "sft":
        return -values[0]
    numbers = {key: value for key, value in options.items() if key not in ("loss_type", "lengths")}
    chosen, rejected = values[0] - values[2], values[1] - values[3]
    if lengths is not None and name in ("ipo", "sigmoid_norm"):
        chosen, rejected = chosen / lengths[0], rejected / lengths[1]
    given = dense.DPOOptions(**numbers)
    return torch.stack([dense.dpo_term(name, one, other, given) for one, other in zip(chosen, rejected)])


@pytest.mark.parametrize("options", CASES + OFFLINE)
def test_losses_and_gradients_pair_by_pair(options: dict[str, Any]) -> None:
    """Compare with formulas as their papers have them, in float64."""
    chosen, rejected, *reference = inputs()
    found = loss_of(chosen, rejected, *reference, **options)
    wanted = plainly(options, [chosen, rejected, *reference])
    assert_close(found.losses, wanted, rtol=1e-10, atol=1e-14)
    sides = (chosen,) if options["loss_type"] == "sft" else (chosen, rejected)
    slopes = torch.autograd.grad(wanted.sum(), sides)
    assert_close(torch.autograd.grad(found.losses.sum(), sides, retain_graph=True), slopes, rtol=1e-8, atol=1e-13)
    beta = options["beta"]
    assert_close(found.chosen_rewards, beta * (chosen.detach() - reference[0]), rtol=1e-12, atol=0)
    assert_close(found.rejected_rewards, beta * (rejected.detach() - reference[1]), rtol=1e-12, atol=0)
    assert not found.chosen_rewards.requires_grad and not found.rejected_rewards.requires_grad
    other = (
        (lambda a, b: loss_of(a, b, *reference, **options).losses)
        if len(sides) == 2
        else (lambda a: loss_of(a, rejected, *reference, **options).losses)
    )
    assert torch.autograd.gradcheck(other, sides)


@pytest.mark.parametrize("options", CASES + OFFLINE)
def test_the_reference_has_no_gradient(options: dict[str, Any]) -> None:
    values = [value.detach().requires_grad_() for value in inputs()]
    loss_of(*values, **options).losses.sum().backward()
    only_chosen = options["loss_type"] == "sft"
    assert [value.grad is None for value in values] == [False, only_chosen, True, True]


def test_a_policy_equal_to_its_reference() -> None:
    _, _, chosen, rejected = inputs()
    found = loss_of(chosen, rejected, chosen, rejected, beta=0.3)
    assert_close(found.losses, torch.full_like(chosen, math.log(2)), rtol=1e-15, atol=0)
    assert_close(found.chosen_rewards, torch.zeros_like(chosen), rtol=0, atol=0)
    found = loss_of(chosen, rejected, chosen, rejected, loss_type="ipo", beta=0.25)
    assert_close(found.losses, torch.full_like(chosen, 4.0), rtol=0, atol=0)


@pytest.mark.parametrize("options", CASES)
def test_default_options_do_not_change_the_loss(options: dict[str, Any]) -> None:
    """Bitwise in fp32: Online DPO's losses, two of DPO's, are not affected by smoothing or lengths."""
    assert set(ONLINE_LOSSES) == {"sigmoid", "ipo"} <= set(LOSSES)
    chosen, rejected, *reference = [value.detach().float() for value in inputs()]
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    beta, margins = options["beta"], (chosen - reference[0]) - (rejected - reference[1])
    wanted = (margins - 1 / (2 * beta)) ** 2 if options["loss_type"] == "ipo" else -F.logsigmoid(beta * margins)
    found = loss_of(chosen, rejected, *reference, **options)
    assert_close(found.losses, wanted, rtol=0, atol=0)
    gradients = (torch.autograd.grad(losses.sum(), (chosen, rejected)) for losses in (found.losses, wanted))
    assert_close(*gradients, rtol=0, atol=0)
    assert_close(found.rejected_rewards, beta * (rejected - reference[1]).detach(), rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_means_sees_a_pair_of_twice_the_tokens_as_the_same(name: str) -> None:
    values, options = inputs(), OPTIONS.get(name, {})
    once = dpo_loss(*values, LOSSES[name], lengths=LENGTHS, **options)
    doubled = dpo_loss(
        *(2 * value for value in values), LOSSES[name], lengths=tuple(2 * n for n in LENGTHS), **options
    )
    same = torch.allclose(once.losses, doubled.losses, rtol=1e-12, atol=0)
    assert same is ("lengths" in LOSSES[name].needs) is (name in ("ipo", "sigmoid_norm"))
    assert_close(doubled.chosen_rewards, 2 * once.chosen_rewards, rtol=0, atol=0)


def test_robust_is_unbiased_under_swapped_labels() -> None:
    """Averaged over swaps with the assumed probability, it is the loss of the labels without noise."""
    chosen, rejected, *reference = inputs()
    stated = loss_of(chosen, rejected, *reference, loss_type="robust", beta=0.3, label_smoothing=0.2).losses
    swapped = loss_of(rejected, chosen, *reversed(reference), loss_type="robust", beta=0.3, label_smoothing=0.2).losses
    assert_close(
        0.8 * stated + 0.2 * swapped, loss_of(chosen, rejected, *reference, beta=0.3).losses, rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [case for case in CASES + OFFLINE if case.get("discopop_tau", 0) < 1])
def test_extremes_are_finite(options: dict[str, Any], dtype: torch.dtype) -> None:
    chosen = vector(-40000.0, -1e-4, -5000.0, dtype=dtype).requires_grad_()
    rejected = vector(-1e-4, -40000.0, -5000.0, dtype=dtype).requires_grad_()
    reference = vector(-10.0, -10.0, -40000.0, dtype=dtype), vector(-10.0, -10.0, -1e-4, dtype=dtype)
    lengths = {"lengths": (torch.tensor([9, 1, 3]), torch.tensor([1, 7, 2]))} if "lengths" in options else {}
    found = loss_of(chosen, rejected, *reference, **{**options, **lengths})
    sides = (chosen,) if options["loss_type"] == "sft" else (chosen, rejected)
    for value in (*found, *torch.autograd.grad(found.losses.sum(), sides)):
        assert value.dtype == dtype
        assert torch.isfinite(value).all()
    # The first pair's margin is -39999.9999 + 9.9999: not log(0).
    if options["loss_type"] in ("sigmoid", "discopop"):
        stated = 1 - options.get("label_smoothing", 0.0)
        assert found.losses[0].item() == pytest.approx(stated * options["beta"] * 40000, rel=1e-6)


@pytest.mark.parametrize("options", CASES + OFFLINE)
def test_no_pairs_give_an_empty_differentiable_loss(options: dict[str, Any]) -> None:
    chosen, rejected, reference = (torch.zeros(0, requires_grad=own) for own in (True, True, False))
    nothing = torch.zeros(0, dtype=torch.int64)
    lengths = {"lengths": (nothing, nothing)} if "lengths" in options else {}
    found = loss_of(chosen, rejected, reference, reference, **{**options, **lengths})
    assert found.losses.shape == found.chosen_rewards.shape == found.rejected_rewards.shape == (0,)
    total = found.losses.sum()
    total.backward()
    assert total.item() == 0.0
    assert chosen.grad is not None and (rejected.grad is not None or options["loss_type"] == "sft")


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_reads_the_options_of_its_entry(name: str) -> None:
    """Besides beta: the entry lists them, and passes on no other."""
    arguments = list(inspect.signature(LOSSES[name].function).parameters)[3:]
    if name == "sigmoid_norm":
        arguments.remove("label_smoothing")
    assert arguments == list(LOSSES[name].reads)
    given = DPOConfig("out", loss_type=name, **OPTIONS.get(name, {}))
    assert LOSSES[name].options(given) == OPTIONS.get(name, {})
    with pytest.raises(TypeError, match="desirable_weight"):
        loss_of(*inputs(), loss_type=name, desirable_weight=1.0, lengths=LENGTHS, **OPTIONS.get(name, {}))


def test_a_subclass_extends_the_table() -> None:
    """With an option that only the new loss reads."""
    assert Further("out", loss_type=["steep", "sft"], slope=2).losses == [("steep", 1.0), ("sft", 1.0)]
    assert Further.LOSSES["steep"].options(Further("out", loss_type="steep")) == {"slope": 1.0}
    for options, said in (
        ({"loss_type": "steep", "slope": -1}, r"^slope=-1.0: must be at least 0 with loss_type='steep'"),
        ({"slope": 2}, r"^slope=2.0: has no effect with loss_type='sigmoid'; .* one of steep$"),
        ({"loss_type": "steeep"}, r"^loss_type='steeep': unknown loss .* did you mean 'steep'\?$"),
        ({"loss_type": "unread"}, r"^loss_type='unread': missing a required argument: 'slope'; .* its Loss reads$"),
    ):
        with pytest.raises(OptionError, match=said):
            Further("out", **options)


def test_a_loss_has_one_value_per_pair() -> None:
    check_values("own", torch.zeros(3), 3)
    for losses in (torch.zeros(()), torch.zeros(1), torch.zeros(3, 1)):
        with pytest.raises(OptionError, match=r"^loss_type='own': .* expected \(3,\)"):
            check_values("own", losses, 3)


@dataclass(kw_only=True)
class Further(DPOConfig):
    """Options with a further loss."""

    LOSSES: ClassVar[Mapping[str, Loss]] = {
        **DPOConfig.LOSSES,
        "steep": Loss(lambda c, r, beta, slope: (beta * slope * (r - c)).exp(), None, {"slope": NOT_NEGATIVE}),
        "unread": Loss(lambda c, r, beta, slope: slope),
    }
    slope: float = option(1.0, "Slope of the loss.")
