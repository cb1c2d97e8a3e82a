"""Kahneman-Tversky Optimization (KTO) and its variant, unpaired APO-zero.

KTO: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", https://arxiv.org/abs/2402.01306.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from alignment.objectives.table import APO, NOT_NEGATIVE, Loss

if TYPE_CHECKING:
    from torch import Tensor


class KTOLoss(NamedTuple):
    """Per-row results: ``losses`` (R,), differentiable and with class weights applied; ``rewards`` (R,), detached."""

    losses: Tensor
    rewards: Tensor


def kto_kl(total: Tensor, count: int) -> Tensor:
    """Compute KTO's reference point z0: the mean log-ratio of a window's mismatched completions, clamped at 0.

    The clamp is applied last, to the mean over the window: clamping per micro-batch would bias the estimate.

    Args:
        total: 0-dim, the sum over all micro-batches and ranks of the policy's log-prob minus the reference's.
        count: number of mismatched completions; if 0, the result is 0.
    """
    return (total / max(count, 1)).clamp(min=0)


def kto_loss(
    policy_logps: Tensor,
    reference_logps: Tensor,
    labels: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> KTOLoss:
    """Compute the KTO or APO-zero loss of every row. Values of options are not checked.

    Args:
        policy_logps: (R,) summed completion log-probs under the policy, differentiable.
        reference_logps: (R,) summed completion log-probs under the reference.
        labels: (R,) bool, True for desirable rows.
        kl: 0-dim, the window's clamped KL estimate; 0 for APO-zero.
        beta: inverse temperature of the implicit reward.
        desirable_weight: factor on the losses of desirable rows (lambda_D of the paper).
        undesirable_weight: factor on the losses of undesirable rows (lambda_U).

    Returns:
        :class:`KTOLoss`; empty input gives empty tensors that still carry the graph.
    """
    log_ratios = policy_logps - reference_logps
    desirable = labels.to(log_ratios.dtype)
    sign = 2 * desirable - 1
    weights = desirable * desirable_weight + (1 - desirable) * undesirable_weight
    # sigmoid(-x) instead of 1 - sigmoid(x): no cancellation for rows that are already learned.
    losses = weights * (-sign * beta * (log_ratios - kl.detach())).sigmoid()
    return KTOLoss(losses, beta * log_ratios.detach())


_WEIGHTS = {"desirable_weight": NOT_NEGATIVE, "undesirable_weight": NOT_NEGATIVE}
LOSSES = {
    "kto": Loss(kto_loss, None, _WEIGHTS, ("reference", "kl")),
    "apo_zero_unpaired": Loss(kto_loss, APO, _WEIGHTS, ("reference",)),
}
