"""Kahneman-Tversky optimisation (KTO) and its unpaired APO-zero variant.

KTO: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", https://arxiv.org/abs/2402.01306.
APO-zero: D'Oosterlinck et al., "Anchored Preference Optimization", https://arxiv.org/abs/2408.06266 (unpaired form).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")


class KTOLoss(NamedTuple):
    """Per-row results: ``losses`` (R,) with the gradient and the class weights in, ``rewards`` (R,) detached."""

    losses: Tensor
    rewards: Tensor


def kto_kl_sums(policy_kl_logps: Tensor, reference_kl_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and count of the log-ratios on mismatched completions, the ingredients of KTO's reference point z0.

    Args:
        policy_kl_logps: (R,) summed log-probs of each mismatched completion under the policy.
        reference_kl_logps: (R,) the same under the reference.

    Returns:
        Two 0-dim tensors, detached: the sum and the number of rows. The caller adds them up over the micro-batches and
        ranks of a window, for :func:`kto_kl`.
    """
    ratios = (policy_kl_logps - reference_kl_logps).detach()
    return ratios.sum(), ratios.new_full((), float(ratios.numel()))


def kto_kl(total: Tensor, count: Tensor) -> Tensor:
    """KTO's reference point z0: the mean log-ratio on the mismatched completions of a window, clamped at 0.

    The clamp comes last, over the whole window: one per batch would make a different, biased estimate.

    Args:
        total: 0-dim, the sum of the log-ratios; see :func:`kto_kl_sums`.
        count: 0-dim, their number; 0 gives 0.
    """
    return (total / count.clamp(min=1)).clamp(min=0)


def kto_loss(
    policy_logps: Tensor,
    reference_logps: Tensor,
    labels: Tensor,
    kl: Tensor,
    *,
    loss_type: str = "kto",
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> KTOLoss:
    """KTO or APO-zero for every row.

    Args:
        policy_logps: (R,) summed completion log-probs under the policy, with gradient.
        reference_logps: (R,) the same under the reference.
        labels: (R,) bool, True for desirable rows.
        kl: 0-dim, the window's clamped KL estimate (not used by ``apo_zero_unpaired``).
        loss_type: ``"kto"`` or ``"apo_zero_unpaired"``.
        beta: inverse temperature of the implicit reward.
        desirable_weight: factor on the losses of desirable rows (lambda_D of the paper).
        undesirable_weight: factor on the losses of undesirable rows (lambda_U).

    Returns:
        :class:`KTOLoss`; empty input gives empty tensors that still carry the graph.

    Raises:
        ValueError: unknown ``loss_type``.
    """
    if loss_type not in KTO_LOSS_TYPES:
        raise ValueError(f"loss_type {loss_type!r} is not one of {', '.join(KTO_LOSS_TYPES)}")
    log_ratios = policy_logps - reference_logps
    anchor = kl.detach() if loss_type == "kto" else torch.zeros_like(kl)
    desirable = labels.to(log_ratios.dtype)
    sign = 2 * desirable - 1
    weights = desirable * desirable_weight + (1 - desirable) * undesirable_weight
    # 1 - sigmoid(x) written as sigmoid(-x): no cancellation where the row is already learnt.
    losses = weights * torch.sigmoid(-sign * beta * (log_ratios - anchor))
    return KTOLoss(losses, beta * log_ratios.detach())
