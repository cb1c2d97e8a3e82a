"""A dense float64 implementation of one KTO, CPO or Online DPO optimizer step, to verify the package's results.

It imports torch, transformers and the standard library, but nothing of the package: every formula is written a second
time in its simplest form. One sequence at a time, no padding, the full log-softmax of the model's logits (including
soft caps and scales), gradients by autograd, one step of plain SGD; no dropout, no load-balancing loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support.oracle.wide import Source, load, token_logps, wide_maths
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

Row = dict[str, Any]
Scored = dict[str, list[Tensor]]


@dataclass(frozen=True)
class StepOptions:
    """Common options: maximum sequence length, gradient clipping threshold (None or 0: off), learning rate."""

    max_length: int | None = None
    max_grad_norm: float | None = None
    learning_rate: float = 1.0


@dataclass(frozen=True)
class KTOOptions(StepOptions):
    """KTO's options with their public names."""

    loss_type: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True)
class CPOOptions(StepOptions):
    """CPO's options with their public names. The defaults of ``cpo_alpha`` and ``alpha`` depend on ``loss_type``."""

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    cpo_alpha: float | None = None
    simpo_gamma: float = 0.5
    alpha: float | None = None

    @property
    def nll_factor(self) -> float:
        """The weight of the NLL term: 1, or 0 for ``alphapo``."""
        return self.cpo_alpha if self.cpo_alpha is not None else float(self.loss_type != "alphapo")

    @property
    def shape(self) -> float:
        """AlphaPO's alpha: 0, or 0.25 for ``alphapo``."""
        return self.alpha if self.alpha is not None else 0.25 * (self.loss_type == "alphapo")


@dataclass(frozen=True)
class DPOOptions(StepOptions):
    """DPO's options with their public names. ``beta`` is the value for the epoch; ``means``: per token, for IPO."""

    loss_type: str | Sequence[str] = "sigmoid"
    loss_weights: Sequence[float] | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    means: bool = False


def kto_objective(
    policy: Tensor, reference: Tensor, labels: Sequence[bool], mismatched: Tensor, options: KTOOptions
) -> tuple[Tensor, dict[str, float]]:
    """Compute the KTO (or APO-zero) loss and metrics of a window.

    ``policy``, ``reference`` (R,): summed log-probs of each row's own completion; ``mismatched`` (M,): policy minus
    reference for rows with a partner. Metrics of a class without rows are omitted.
    """
    if options.loss_type not in ("kto", "apo_zero_unpaired"):
        raise ValueError(f"loss_type {options.loss_type!r} is not kto or apo_zero_unpaired")
    kl = 0.0
    if options.loss_type == "kto" and len(mismatched):
        kl = max(0.0, float(mismatched.detach().mean()))
    terms = []
    for own, base, label in zip(policy, reference, labels, strict=True):
        gain = own - base.detach() - kl
        weight, sign = (options.desirable_weight, 1) if label else (options.undesirable_weight, -1)
        terms.append(weight * (1 - torch.sigmoid(sign * options.beta * gain)))
    loss = torch.stack(terms).mean()
    metrics = {"loss": float(loss.detach()), "kl": kl}
    for name, wanted in (("chosen", True), ("rejected", False)):
        rows = [row for row, label in enumerate(labels) if bool(label) is wanted]
        if rows:
            metrics[f"rewards/{name}"] = float(options.beta * (policy - reference)[rows].detach().mean())
            metrics[f"logps/{name}"] = float(policy[rows].detach().mean())
    if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return loss, metrics


def cpo_objective(
    chosen: Tensor, rejected: Tensor, lengths: tuple[Sequence[int], Sequence[int]], options: CPOOptions
) -> tuple[Tensor, dict[str, float]]:
    """Compute CPO loss, NLL term and metrics of a window from (P,) summed log-probs and lengths in tokens.

    ``logps/*`` are the inputs of the loss: means over tokens for ``ipo``, ``simpo`` and ``alphapo``, otherwise sums.
    """
    nll = -chosen.sum() / sum(lengths[0])
    if options.loss_type in ("ipo", "simpo", "alphapo"):
        chosen = chosen / torch.tensor(lengths[0])
        rejected = rejected / torch.tensor(lengths[1])
    good, bad = chosen, rejected
    if options.shape != 0:
        if options.loss_type not in ("simpo", "alphapo"):
            raise ValueError(f"alpha {options.shape} is for simpo and alphapo, not {options.loss_type!r}")
        good = (1 - torch.exp(-options.shape * chosen)) / options.shape
        bad = (1 - torch.exp(-options.shape * rejected)) / options.shape
    preference = _preference(good - bad, options)
    loss = preference.mean() + options.nll_factor * nll
    good, bad = options.beta * good.detach(), options.beta * bad.detach()
    return loss, {
        "loss": float(loss.detach()),
        "nll_loss": float(nll.detach()),
        "rewards/chosen": float(good.mean()),
        "rewards/rejected": float(bad.mean()),
        "rewards/margins": float(good.mean() - bad.mean()),
        "rewards/accuracies": float((good > bad).double().mean()),
        "logps/chosen": float(chosen.detach().mean()),
        "logps/rejected": float(rejected.detach().mean()),
    }


def dpo_objective(
    policy: tuple[Tensor, Tensor],
    reference: tuple[Tensor, Tensor],
    options: DPOOptions,
    lengths: tuple[list[int], list[int]] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Compute the DPO loss and metrics of a window from (P,) summed log-probs of chosen and rejected completions.

    IPO uses log-ratios per token if ``options.means`` is set and ``lengths`` are given. ``objective/*`` are means over
    all 2P sequences of both sides; all other metrics are means over pairs. Several losses are added up.
    """
    good, bad = (own - base.detach() for own, base in zip(policy, reference, strict=True))
    names = [options.loss_type] if isinstance(options.loss_type, str) else options.loss_type
    parts = []
    for name, weight in zip(names, options.loss_weights or [1.0] * len(names), strict=True):
        if name == "sft":
            parts.append(weight * -policy[0].sum() / sum(lengths[0]))
            continue
        c, r = good, bad
        if lengths is not None and (name == "sigmoid_norm" or (name == "ipo" and options.means)):
            c, r = good / torch.tensor(lengths[0]), bad / torch.tensor(lengths[1])
        terms = [dpo_term(name, one, other, options) for one, other in zip(c, r, strict=True)]
        parts.append(weight * torch.stack(terms).mean())
    loss = torch.stack(parts).sum()
    good, bad = good.detach(), bad.detach()
    kl = float(torch.cat([good, bad]).mean())
    return loss, {
        "loss": float(loss.detach()),
        "rewards/chosen": float((options.beta * good).mean()),
        "rewards/rejected": float((options.beta * bad).mean()),
        "rewards/margins": float((options.beta * (good - bad)).mean()),
        "rewards/accuracies": float((good > bad).double().mean()),
        "logps/chosen": float(policy[0].detach().mean()),
        "logps/rejected": float(policy[1].detach().mean()),
        "objective/kl": kl,
        "objective/non_score_reward": -options.beta * kl,
    }


def dpo_term(name: str, good: Tensor, bad: Tensor, options: DPOOptions) -> Tensor:
    """Return a loss of one pair from its two 0-dim log-ratios, as its paper has it."""
    beta, flipped, gap = options.beta, options.label_smoothing, good - bad
    wins = torch.sigmoid(beta * gap)
    if name in ("sigmoid", "sigmoid_norm"):
        flipped = flipped if name == "sigmoid" else 0.0
        return -(1 - flipped) * torch.log(wins) - flipped * torch.log(1 - wins)
    if name == "hinge":
        return (1 - beta * gap) * float(beta * gap < 1)
    if name == "ipo":
        return (gap - 0.5 / beta).square()
    if name == "robust":  # so that the expectation over flipped labels is the sigmoid loss
        return (flipped * torch.log(1 - wins) - (1 - flipped) * torch.log(wins)) / (1 - 2 * flipped)
    if name == "exo_pair":  # KL(wins, 1 - wins || 1 - flipped, flipped)
        return wins * torch.log(wins / (1 - flipped)) + (1 - wins) * torch.log((1 - wins) / flipped)
    if name == "nca_pair":
        return softplus(-beta * good) + (softplus(beta * good) + softplus(beta * bad)) / 2
    if name == "bco_pair":
        return softplus(-beta * good) + softplus(beta * bad)
    if name == "sppo_hard":
        return (good - 1 / (2 * beta)).square() + (bad + 1 / (2 * beta)).square()
    if name == "apo_zero":
        return 1 - torch.sigmoid(beta * good) + torch.sigmoid(beta * bad)
    if name == "apo_down":
        return torch.sigmoid(beta * good) + 1 - wins
    if name == "discopop":
        share = torch.sigmoid(beta * gap / options.discopop_tau)
        return (1 - share) * softplus(-beta * gap) + share * torch.exp(-beta * gap)
    raise ValueError(f"loss_type {name!r} is not a loss of DPO")


def reward_objective(
    chosen: Tensor, rejected: Tensor, margins: Tensor, center: float
) -> tuple[Tensor, dict[str, float]]:
    """Compute the Bradley-Terry loss and metrics of a window from (P,) scores; ``center``: of their sums."""
    losses = (1 + (rejected - chosen + margins).exp()).log() + center * (chosen + rejected).square()
    loss, good, bad = losses.mean(), chosen.detach(), rejected.detach()
    return loss, {
        "loss": float(loss.detach()),
        "rewards/chosen": float(good.mean()),
        "rewards/rejected": float(bad.mean()),
        "rewards/margins": float((good - bad).mean()),
        "rewards/accuracies": float((good > bad).double().mean()),
        "mean_reward": float(torch.cat([good, bad]).mean()),
    }


def _preference(gap: Tensor, options: CPOOptions) -> Tensor:
    """Return the (P,) preference loss of each pair from the difference of its two scores."""
    if options.loss_type == "hinge":
        return torch.clamp(1 - options.beta * gap, min=0)
    if options.loss_type == "ipo":
        return (gap - 1 / (2 * options.beta)) ** 2
    if options.loss_type not in ("sigmoid", "simpo", "alphapo"):
        raise ValueError(f"loss_type {options.loss_type!r} is not sigmoid, hinge, ipo, simpo or alphapo")
    logit = options.beta * gap
    if options.loss_type != "sigmoid":
        logit = logit - options.simpo_gamma
    swapped = options.label_smoothing
    return -(1 - swapped) * logsigmoid(logit) - swapped * logsigmoid(-logit)


@dataclass
class Step:
    """The result of an optimizer step: values, per-token log-probs by kind of sequence, and the update by name."""

    loss: float
    metrics: dict[str, float]
    grad_norm: float
    clip: float
    logps: dict[str, list[list[float]]]
    gradients: dict[str, Tensor] = field(repr=False)
    update: dict[str, Tensor] = field(repr=False)
    weights: dict[str, Tensor] = field(repr=False)


def kto_window(
    policy: nn.Module, reference: nn.Module | None, rows: Sequence[Row], options: KTOOptions
) -> tuple[Tensor, dict[str, float], Scored]:
    """Return the differentiable loss, metrics and log-probs of rows ``{prompt_ids, completion_ids, label, partner}``.

    ``partner`` is the index of the row whose completion follows this row's prompt in the KL estimate, or None. If
    truncation removes it completely, the row counts with a log-ratio of 0. Without a ``reference``, the policy is
    used.
    """
    base = policy if reference is None else reference
    own = [token_logps(policy, row["prompt_ids"], row["completion_ids"], options.max_length) for row in rows]
    scored: Scored = {"policy": own, "reference": [], "policy_kl": [], "reference_kl": []}
    with torch.no_grad():
        for row in rows:
            scored["reference"].append(token_logps(base, row["prompt_ids"], row["completion_ids"], options.max_length))
            partner = row.get("partner")
            if partner is None or options.loss_type != "kto":
                continue
            other = rows[partner]["completion_ids"]
            scored["policy_kl"].append(token_logps(policy, row["prompt_ids"], other, options.max_length))
            scored["reference_kl"].append(token_logps(base, row["prompt_ids"], other, options.max_length))
    labels, mismatched = [row["label"] for row in rows], _sums(scored["policy_kl"]) - _sums(scored["reference_kl"])
    loss, metrics = kto_objective(_sums(own), _sums(scored["reference"]), labels, mismatched, options)
    return loss, metrics, scored


def cpo_window(policy: nn.Module, rows: Sequence[Row], options: CPOOptions) -> tuple[Tensor, dict[str, float], Scored]:
    """Return the differentiable loss, metrics and log-probs of rows ``{prompt_ids, chosen_ids, rejected_ids}``."""
    scored: Scored = {
        kind: [token_logps(policy, row["prompt_ids"], row[f"{kind}_ids"], options.max_length) for row in rows]
        for kind in ("chosen", "rejected")
    }
    chosen, rejected = scored["chosen"], scored["rejected"]
    lengths = list(map(len, chosen)), list(map(len, rejected))
    loss, metrics = cpo_objective(_sums(chosen), _sums(rejected), lengths, options)
    return loss, metrics, scored


def dpo_window(
    policy: nn.Module, reference: nn.Module | None, rows: Sequence[Row], options: DPOOptions
) -> tuple[Tensor, dict[str, float], Scored]:
    """Return the differentiable loss, metrics and log-probs of rows ``{prompt_ids, chosen_ids, rejected_ids}``.

    Rows may have ``scores`` of the chosen and the rejected completion; the rewards minus the KL penalty are then
    computed as well. Without a ``reference``, the policy is used.
    """
    base = policy if reference is None else reference
    sides = ("chosen", "rejected")
    scored: Scored = {}
    for side in sides:
        pairs = [(row["prompt_ids"], row[f"{side}_ids"]) for row in rows]
        scored[side] = [token_logps(policy, *pair, options.max_length) for pair in pairs]
        with torch.no_grad():
            scored[f"reference_{side}"] = [token_logps(base, *pair, options.max_length) for pair in pairs]
    own, fixed = ((_sums(scored[f"{who}chosen"]), _sums(scored[f"{who}rejected"])) for who in ("", "reference_"))
    lengths = list(map(len, scored["chosen"])), list(map(len, scored["rejected"]))
    loss, metrics = dpo_objective(own, fixed, options, lengths)
    if all("scores" in row for row in rows):
        scores = [score for row in rows for score in row["scores"]]
        metrics["objective/rlhf_reward"] = sum(scores) / len(scores) + metrics["objective/non_score_reward"]
    return loss, metrics, scored


def _sums(sequences: Sequence[Tensor]) -> Tensor:
    return torch.stack([one.sum() for one in sequences]) if sequences else torch.zeros(0, dtype=torch.float64)


def solve(
    model: Source, rows: Sequence[Row], options: KTOOptions | CPOOptions | DPOOptions, reference: Source | None = None
) -> Step:
    """Make one SGD step on a window.

    Folders are loaded and live modules copied, in float64; a tied weight counts once.
    """
    policy = load(model)
    if isinstance(options, CPOOptions):
        loss, metrics, scored = cpo_window(policy, rows, options)
    else:
        base = None if reference is None else load(reference)
        if isinstance(options, KTOOptions):
            loss, metrics, scored = kto_window(policy, base, rows, options)
        else:
            loss, metrics, scored = dpo_window(policy, base, rows, options)
    trained = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    with wide_maths():
        found = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    norm = math.sqrt(sum(float((grad**2).sum()) for grad in found))
    clip = min(1.0, options.max_grad_norm / (norm + 1e-6)) if options.max_grad_norm else 1.0
    gradients = dict(zip(trained, found, strict=True))
    update = {name: -options.learning_rate * clip * grad for name, grad in gradients.items()}
    weights = {name: weight.detach() + update[name] for name, weight in trained.items()}
    logps = {kind: [one.tolist() for one in sequences] for kind, sequences in scored.items()}
    return Step(metrics["loss"], metrics, norm, clip, logps, gradients, update, weights)
