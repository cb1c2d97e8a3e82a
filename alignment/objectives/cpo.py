"""Contrastive Preference Optimization (CPO) and related reference-free losses.

CPO: Xu et al., https://arxiv.org/abs/2401.08417. SimPO: Meng et al., https://arxiv.org/abs/2405.14734.
AlphaPO: Gupta et al., https://arxiv.org/abs/2501.03884. IPO: Azar et al., https://arxiv.org/abs/2310.12036.
Hinge: SLiC, Zhao et al., https://arxiv.org/abs/2305.10425.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")
LENGTH_NORMALIZED = frozenset({"ipo", "simpo", "alphapo"})


class CPOLoss(NamedTuple):
    """Per-pair results: ``losses`` (P,), differentiable, without the NLL term; the rewards (P,) are detached."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def alpha_reward(mean_logps: Tensor, alpha: float) -> Tensor:
    """AlphaPO's reward ``(1 - p^-alpha) / alpha`` of the length-normalized likelihood p; log p if alpha is 0."""
    if alpha == 0.0:
        return mean_logps
    # expm1 avoids the loss of precision of 1 - exp(...) for small alpha.
    return -torch.expm1(-alpha * mean_logps) / alpha


def cpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    simpo_gamma: float = 0.5,
    alpha: float = 0.0,
) -> CPOLoss:
    """Compute the preference loss of every pair. The caller adds the NLL term (``cpo_alpha`` times ``nll``).

    Args:
        chosen_logps: (P,) summed log-probs of the chosen completions, differentiable.
        rejected_logps: (P,) summed log-probs of the rejected completions, differentiable.
        chosen_lengths: (P,) number of tokens of the chosen completions.
        rejected_lengths: (P,) number of tokens of the rejected completions.
        loss_type: one of :data:`CPO_LOSS_TYPES`. ``ipo``, ``simpo`` and ``alphapo`` use means over tokens.
        beta: inverse temperature; tau for ``ipo``.
        label_smoothing: probability that a pair's labels are swapped (``sigmoid``, ``simpo``, ``alphapo``).
        simpo_gamma: target reward margin of ``simpo`` and ``alphapo``.
        alpha: AlphaPO's shape parameter for ``simpo`` and ``alphapo``; must be 0 for other types.

    Raises:
        ValueError: unknown ``loss_type``, or ``alpha`` with a loss on summed log-probs.
    """
    if loss_type not in CPO_LOSS_TYPES:
        raise ValueError(f"loss_type {loss_type!r} is not one of {', '.join(CPO_LOSS_TYPES)}")
    if alpha != 0.0 and loss_type not in ("simpo", "alphapo"):
        raise ValueError(
            f"alpha={alpha} requires length-normalized log-probs, which loss_type {loss_type!r} does not use"
        )
    if loss_type in LENGTH_NORMALIZED:
        chosen_logps, rejected_logps = chosen_logps / chosen_lengths, rejected_logps / rejected_lengths
    chosen, rejected = alpha_reward(chosen_logps, alpha), alpha_reward(rejected_logps, alpha)
    margins = chosen - rejected
    if loss_type == "hinge":
        losses = torch.relu(1 - beta * margins)
    elif loss_type == "ipo":
        losses = (margins - 1 / (2 * beta)) ** 2
    else:
        if loss_type != "sigmoid":
            margins = margins - simpo_gamma / beta
        losses = (
            -F.logsigmoid(beta * margins) * (1 - label_smoothing) - F.logsigmoid(-beta * margins) * label_smoothing
        )
    return CPOLoss(losses, beta * chosen.detach(), beta * rejected.detach())
