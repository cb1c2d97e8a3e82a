"""Kahneman-Tversky Optimization (KTO) and its variant, unpaired APO-zero.

KTO: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", https://arxiv.org/abs/2402.01306.
APO-zero: D'Oosterlinck et al., "Anchored Preference Optimization", https://arxiv.org/abs/2408.06266 (unpaired form).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")


class KTOLoss(NamedTuple):
    """Per-row results: ``losses`` (R,), differentiable and with class weights applied; ``rewards`` (R,), detached."""

    losses: Tensor
    rewards: Tensor


def kto_kl_sums(policy_kl_logps: Tensor, reference_kl_logps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum and the number of the log-ratios of mismatched completions, for KTO's reference point z0.

    Args:
        policy_kl_logps: (R,) summed log-probs of each mismatched completion under the policy.
        reference_kl_logps: (R,) summed log-probs of each mismatched completion under the reference.

    Returns:
        Two detached 0-dim tensors: the sum and the number of rows. The caller adds them up over the micro-batches and
        ranks of a window and passes the totals to :func:`kto_kl`.
    """
    ratios = (policy_kl_logps - reference_kl_logps).detach()
    return ratios.sum(), ratios.new_full((), float(ratios.numel()))


def kto_kl(total: Tensor, count: Tensor) -> Tensor:
    """Compute KTO's reference point z0: the mean log-ratio of a window's mismatched completions, clamped at 0.

    The clamp is applied last, to the mean over the window: clamping per micro-batch would bias the estimate.

    Args:
        total: 0-dim, the sum of the log-ratios; see :func:`kto_kl_sums`.
        count: 0-dim, their number; if 0, the result is 0.
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
    """Compute the KTO or APO-zero loss of every row.

    Args:
        policy_logps: (R,) summed completion log-probs under the policy, differentiable.
        reference_logps: (R,) summed completion log-probs under the reference.
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
    # sigmoid(-x) instead of 1 - sigmoid(x): no cancellation for rows that are already learned.
    losses = weights * torch.sigmoid(-sign * beta * (log_ratios - anchor))
    return KTOLoss(losses, beta * log_ratios.detach())
