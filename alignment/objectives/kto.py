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


def prospect(
    gains: Tensor, labels: Tensor, beta: float, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """Return the (R,) losses of rows, weighted by class.

    Args:
        gains: (R,) log-ratios minus the reference point.
        labels: (R,) bool, True for desirable rows.
        beta: inverse temperature of the implicit reward.
        desirable_weight: factor on the losses of desirable rows (lambda_D of the paper).
        undesirable_weight: factor on the losses of undesirable rows (lambda_U).
    """
    desirable = labels.to(gains.dtype)
    sign = 2 * desirable - 1
    weights = desirable * desirable_weight + (1 - desirable) * undesirable_weight
    # sigmoid(-x) instead of 1 - sigmoid(x): no cancellation for rows that are already learned.
    return weights * (-sign * beta * gains).sigmoid()


_WEIGHTS = {"desirable_weight": NOT_NEGATIVE, "undesirable_weight": NOT_NEGATIVE}
LOSSES = {
    "kto": Loss(prospect, None, _WEIGHTS, ("reference", "kl")),
    "apo_zero_unpaired": Loss(prospect, APO, _WEIGHTS, ("reference",)),
}


def kto_loss(
    policy_logps: Tensor,
    reference_logps: Tensor,
    labels: Tensor,
    kl: Tensor,
    loss: Loss = LOSSES["kto"],
    *,
    beta: float = 0.1,
    **options: float,
) -> KTOLoss:
    """Compute the KTO or APO-zero loss of every row. Values of options are not checked.

    Args:
        policy_logps: (R,) summed completion log-probs under the policy, differentiable.
        reference_logps: (R,) summed completion log-probs under the reference.
        labels: (R,) bool, True for desirable rows.
        kl: 0-dim, the window's clamped KL estimate (not used by ``apo_zero_unpaired``).
        loss: an entry of :data:`LOSSES`.
        beta: inverse temperature of the implicit reward.
        **options: the options that the loss reads.

    Returns:
        :class:`KTOLoss`; empty input gives empty tensors that still carry the graph.
    """
    log_ratios = policy_logps - reference_logps
    gains = log_ratios - kl.detach() if "kl" in loss.needs else log_ratios
    return KTOLoss(loss.function(gains, labels, beta, **options), beta * log_ratios.detach())
