"""The pure losses of ``alignment.objectives`` compared with published values and the float64 oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from support.oracle import dense
from torch import Tensor
from torch.testing import assert_close
from transformers import HfArgumentParser

from alignment.config.errors import OptionError
from alignment.methods.cpo_options import CPOConfig
from alignment.objectives import cpo, kto
from alignment.objectives.kto import kto_kl
from alignment.objectives.likelihood import nll
from alignment.objectives.pairs import PairResult, hinge
from alignment.objectives.table import Loss

KTO_CASES: list[dict[str, Any]] = [
    {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    {"loss_type": "kto", "beta": 0.7, "desirable_weight": 1.5, "undesirable_weight": 0.25},
    {"loss_type": "apo_zero_unpaired", "beta": 0.3, "desirable_weight": 0.5, "undesirable_weight": 2.0},
]
CPO_CASES: list[dict[str, Any]] = [
    {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0},
    {"loss_type": "sigmoid", "beta": 0.4, "label_smoothing": 0.2},
    {"loss_type": "hinge", "beta": 0.1},
    {"loss_type": "ipo", "beta": 0.25},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.2, "label_smoothing": 0.1},
    {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.3, "alpha": -0.5},
    {"loss_type": "alphapo", "beta": 2.0, "simpo_gamma": 0.5, "alpha": 0.25, "label_smoothing": 0.05},
]


def vector(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def kto_defaults(**changes: Any) -> dict[str, Any]:
    return {**KTO_CASES[0], **changes}


def cpo_defaults(**changes: Any) -> dict[str, Any]:
    neutral = {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "simpo_gamma": 0.5, "alpha": 0.0}
    return {**neutral, **changes}


def kto_loss(*values: Tensor, loss_type: str, **options: Any) -> kto.KTOLoss:
    """Return a loss of KTO by name; the KL is 0 for those that do not need it."""
    policy, reference, labels, kl = values
    return kto.kto_loss(policy, reference, labels, kl * ("kl" in kto.LOSSES[loss_type].needs), **options)


def cpo_loss(*values: Tensor, loss_type: str, beta: float, **options: Any) -> PairResult:
    """Return a loss of CPO by name, with the options that it reads."""
    loss = cpo.LOSSES[loss_type]
    read = {name: value for name, value in options.items() if name in loss.reads}
    return cpo.cpo_loss(*values, loss, beta=beta, **read)


def kto_inputs(rows: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return policy and reference sums, labels, and a positive KL."""
    noise = torch.Generator().manual_seed(3)
    policy = -40 * torch.rand(rows, generator=noise, dtype=torch.float64)
    reference = policy.clone() + 4 * torch.randn(rows, generator=noise, dtype=torch.float64)
    return policy.requires_grad_(), reference, torch.rand(rows, generator=noise) < 0.6, vector(0.35)[0]


def cpo_inputs(pairs: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return chosen and rejected sums, differentiable, and their lengths."""
    noise = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 12, (2, pairs), generator=noise)
    sums = -(0.2 + 3 * torch.rand(2, pairs, generator=noise, dtype=torch.float64)) * lengths
    return sums[0].clone().requires_grad_(), sums[1].clone().requires_grad_(), lengths[0], lengths[1]


@pytest.mark.parametrize(
    ("changes", "losses", "mean"),
    [
        ({}, (0.4538814590, 0.4712816430), 0.4625815510),
        ({"desirable_weight": 1.5, "undesirable_weight": 0.5}, None, 0.4582315050),
        ({"loss_type": "apo_zero_unpaired"}, (0.4501660027, 0.4750208125), None),
    ],
)
def test_kto_golden_numbers(changes: dict[str, Any], losses: tuple[float, ...] | None, mean: float | None) -> None:
    labels = torch.tensor([True, False])
    found = kto_loss(vector(-8.0, -21.0), vector(-10.0, -20.0), labels, vector(0.15)[0], **kto_defaults(**changes))
    if losses is not None:
        assert_close(found.losses, vector(*losses), rtol=0, atol=1e-9)
    if mean is not None:
        assert_close(found.losses.mean(), vector(mean)[0], rtol=0, atol=1e-9)
    assert_close(found.rewards, vector(0.2, -0.1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
def test_kto_of_a_policy_equal_to_its_reference(loss_type: str) -> None:
    logps = vector(-3.0, -700.0, -41.5)
    options = kto_defaults(loss_type=loss_type, desirable_weight=1.5, undesirable_weight=0.5)
    found = kto_loss(logps, logps, torch.tensor([True, False, True]), vector(0.0)[0], **options)
    assert_close(found.losses, vector(0.75, 0.25, 0.75), rtol=0, atol=0)
    assert_close(found.rewards, vector(0.0, 0.0, 0.0), rtol=0, atol=0)


def test_kto_kl_is_a_clamped_mean() -> None:
    kl = kto_kl(vector(-2.0)[0], 2)
    assert float(kl) == float(kto_kl(vector(0.0)[0], 0)) == 0.0 and float(kto_kl(vector(4.0)[0], 2)) == 2.0
    assert float(kto_kl(vector(1.0)[0], 1)) == 1.0, "of a single row, which may have a partner in another window"
    found = kto_loss(vector(-8.0), vector(-10.0), torch.tensor([True]), kl, **kto_defaults())
    assert_close(found.losses, 1 - torch.sigmoid(vector(0.2)), rtol=0, atol=1e-15)


def test_kto_kl_has_no_gradient() -> None:
    policy, reference, labels, _ = kto_inputs()
    kl = vector(0.4)[0].requires_grad_()
    kto_loss(policy, reference, labels, kl, **kto_defaults()).losses.sum().backward()
    assert kl.grad is None
    assert policy.grad is not None


@pytest.mark.parametrize("options", KTO_CASES)
def test_kto_against_the_oracle(options: dict[str, Any]) -> None:
    policy, reference, labels, kl = kto_inputs()
    found = kto_loss(policy, reference, labels, kl, **options)
    (gradient,) = torch.autograd.grad(found.losses.mean(), policy)
    wanted, metrics = dense.kto_objective(policy, reference, labels.tolist(), kl[None], dense.KTOOptions(**options))
    assert_close(found.losses.mean(), wanted, rtol=1e-12, atol=1e-14)
    assert_close(gradient, torch.autograd.grad(wanted, policy)[0], rtol=1e-10, atol=1e-14)
    assert_close(found.rewards[labels].mean().item(), metrics["rewards/chosen"], rtol=1e-12, atol=1e-14)
    assert_close(found.rewards[~labels].mean().item(), metrics["rewards/rejected"], rtol=1e-12, atol=1e-14)
    assert not found.rewards.requires_grad


def test_kto_properties() -> None:
    policy, reference, labels, kl = kto_inputs()
    options = kto_defaults(desirable_weight=1.5, undesirable_weight=0.5)
    found = kto_loss(policy, reference, labels, kl, **options)
    tripled = kto_loss(policy, reference, labels, kl, **kto_defaults(desirable_weight=4.5, undesirable_weight=1.5))
    assert_close(tripled.losses, 3 * found.losses, rtol=1e-14, atol=0)
    assert_close(tripled.rewards, found.rewards, rtol=0, atol=0)
    only_good = kto_loss(policy, reference, labels, kl, **kto_defaults(undesirable_weight=0.0)).losses
    assert not only_good[~labels].any() and only_good[labels].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", KTO_CASES)
def test_kto_extremes_are_finite(options: dict[str, Any], dtype: torch.dtype) -> None:
    policy = vector(-5000.0, -5000.0, -1.0, -1.0, -5000.0, dtype=dtype).requires_grad_()
    reference = vector(-1.0, -1.0, -5000.0, -5000.0, -5000.0, dtype=dtype)
    labels = torch.tensor([True, False, True, False, True])
    found = kto_loss(policy, reference, labels, vector(0.0, dtype=dtype)[0], **options)
    found.losses.sum().backward()
    assert found.losses.dtype == found.rewards.dtype == dtype
    good, bad = options["desirable_weight"], options["undesirable_weight"]
    assert_close(found.losses.detach(), vector(good, 0.0, 0.0, bad, good / 2, dtype=dtype), rtol=0, atol=1e-6)
    assert policy.grad is not None and torch.isfinite(policy.grad).all()


@pytest.mark.parametrize(
    ("changes", "loss"),
    [
        ({}, 0.5543552445),
        ({"label_smoothing": 0.1}, 0.5843552446),
        ({"loss_type": "hinge"}, 0.7),
        ({"loss_type": "ipo"}, 30.25),
        ({"loss_type": "simpo", "beta": 2.0}, 1.7014132780),
        ({"loss_type": "simpo"}, 1.0054924815),
        ({"loss_type": "alphapo", "beta": 2.0, "alpha": 0.25}, 2.5696818192),
        ({"loss_type": "simpo", "beta": 2.0, "alpha": 0.25}, 2.5696818192),
    ],
)
def test_cpo_golden_numbers(changes: dict[str, Any], loss: float) -> None:
    inputs = vector(-12.0), vector(-15.0), torch.tensor([4]), torch.tensor([6])
    found = cpo_loss(*inputs, **cpo_defaults(**changes))
    assert_close(found.losses, vector(loss), rtol=0, atol=1e-9)
    total, count = nll(inputs[0], inputs[2])
    assert (float(total), float(count)) == (12.0, 4.0)
    if not changes:
        assert_close(found.losses.mean() + total / count, vector(3.5543552445)[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("options", CPO_CASES)
def test_cpo_against_the_oracle(options: dict[str, Any]) -> None:
    chosen, rejected, chosen_lengths, rejected_lengths = cpo_inputs()
    found = cpo_loss(chosen, rejected, chosen_lengths, rejected_lengths, **cpo_defaults(**options))
    total, count = nll(chosen, chosen_lengths)
    lengths = chosen_lengths.tolist(), rejected_lengths.tolist()
    for factor in (0.0, 0.7):
        loss = found.losses.mean() + factor * total / count
        wanted, metrics = dense.cpo_objective(chosen, rejected, lengths, dense.CPOOptions(cpo_alpha=factor, **options))
        assert_close(loss, wanted, rtol=1e-12, atol=1e-14)
        gradients = torch.autograd.grad(loss, (chosen, rejected), retain_graph=True)
        assert_close(gradients, torch.autograd.grad(wanted, (chosen, rejected)), rtol=1e-9, atol=1e-14)
    assert_close((total / count).item(), metrics["nll_loss"], rtol=1e-12, atol=1e-14)
    assert_close(found.chosen_rewards.mean().item(), metrics["rewards/chosen"], rtol=1e-12, atol=1e-14)
    assert_close(found.rejected_rewards.mean().item(), metrics["rewards/rejected"], rtol=1e-12, atol=1e-14)
    accuracy = (found.chosen_rewards > found.rejected_rewards).double().mean()
    assert 0 < float(accuracy) < 1
    assert float(accuracy) == metrics["rewards/accuracies"]
    assert not found.chosen_rewards.requires_grad and not found.rejected_rewards.requires_grad


def test_alpha_near_zero_is_simpo() -> None:
    chosen, rejected, *lengths = cpo_inputs()
    plain = cpo_loss(chosen, rejected, *lengths, **cpo_defaults(loss_type="simpo", beta=2.0)).losses
    for alpha in (1e-12, -1e-12, 1e-7):
        near = cpo_loss(chosen, rejected, *lengths, **cpo_defaults(loss_type="alphapo", beta=2.0, alpha=alpha))
        assert_close(near.losses, plain, rtol=0, atol=20 * abs(alpha) + 1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", CPO_CASES)
def test_cpo_extremes_are_finite(options: dict[str, Any], dtype: torch.dtype) -> None:
    options = cpo_defaults(**options)
    # Sums whose exponential underflows even in float64, like those of long completions.
    chosen = vector(-5000.0, -2.0, -40000.0, -1e-4, dtype=dtype).requires_grad_()
    rejected = vector(-4.0, -5000.0, -39999.0, -5000.0, dtype=dtype).requires_grad_()
    lengths = torch.tensor([1024, 2, 8192, 1]), torch.tensor([2, 1024, 8192, 512])
    found = cpo_loss(chosen, rejected, *lengths, **options)
    gradients = torch.autograd.grad(found.losses.sum(), (chosen, rejected))
    for value in (*found, *gradients):
        assert value.dtype == dtype
        assert torch.isfinite(value).all()
    wide, tokens = (chosen.detach().double(), rejected.detach().double()), (lengths[0].tolist(), lengths[1].tolist())
    wanted, _ = dense.cpo_objective(*wide, tokens, dense.CPOOptions(cpo_alpha=0.0, **options))
    assert_close(found.losses.mean().double(), wanted, rtol=1e-5, atol=1e-6)


def test_no_rows_give_empty_differentiable_losses() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    for options in KTO_CASES:
        policy = none.clone().requires_grad_()
        found = kto_loss(policy, none, torch.zeros(0, dtype=torch.bool), vector(0.0)[0], **options)
        assert found.losses.shape == found.rewards.shape == (0,)
        assert found.losses.sum().item() == 0.0
        found.losses.sum().backward()
        assert policy.grad is not None
    for options in CPO_CASES:
        chosen, rejected = none.clone().requires_grad_(), none.clone().requires_grad_()
        lengths = torch.zeros(0, dtype=torch.long)
        pairs = cpo_loss(chosen, rejected, lengths, lengths, **cpo_defaults(**options))
        assert pairs.losses.shape == pairs.chosen_rewards.shape == pairs.rejected_rewards.shape == (0,)
        total, count = nll(chosen, lengths)
        assert total.item() == count.item() == 0.0
        (pairs.losses.sum() + total).backward()
        assert chosen.grad is not None and rejected.grad is not None


@pytest.mark.parametrize("name", cpo.LOSSES)
def test_a_loss_of_cpo_reads_the_options_of_its_entry(name: str) -> None:
    loss, values = cpo.LOSSES[name], cpo_inputs()
    assert loss.options(CPOConfig("out", loss_type=name)).keys() == loss.reads.keys()
    for option, value in {"label_smoothing": 0.1, "simpo_gamma": 1.5, "alpha": 0.3}.items():
        if option in loss.reads:
            assert (cpo.cpo_loss(*values, loss, **{option: value}).losses != cpo.cpo_loss(*values, loss).losses).any()
        else:
            with pytest.raises(TypeError, match=option):
                cpo.cpo_loss(*values, loss, **{option: value})


@dataclass(kw_only=True)
class Further(CPOConfig):
    """Options with a further loss."""

    LOSSES: ClassVar[Mapping[str, Loss]] = {**CPOConfig.LOSSES, "steep": Loss(hinge)}


def test_a_subclass_extends_the_losses_of_cpo() -> None:
    """Without declaring the option again."""
    [options] = HfArgumentParser(Further).parse_args_into_dataclasses(["--output_dir", "out", "--loss_type", "steep"])
    assert options.loss_type == options.sealed().loss_type == "steep" and options.simpo_gamma == 0.5
    with pytest.raises(OptionError, match=r"^loss_type='steeep': must .*'steep'; did you mean 'steep'\?$"):
        Further("out", loss_type="steeep")
    with pytest.raises(OptionError, match="^loss_type='steep': "):
        CPOConfig("out", loss_type="steep")
