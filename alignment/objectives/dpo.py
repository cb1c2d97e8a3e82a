"""Direct preference optimisation (DPO), the objective of Online DPO: pairs are compared by the policy's log-ratios.

DPO: Rafailov et al., https://arxiv.org/abs/2305.18290. IPO: Azar et al., https://arxiv.org/abs/2310.12036.
Online DPO, where the policy writes both answers of a pair: Guo et al., https://arxiv.org/abs/2402.04792.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

DPO_LOSS_TYPES = ("sigmoid", "ipo")


class DPOResult(NamedTuple):
    """Per-pair results: ``losses`` (P,) with gradient; the rewards (P,) are detached."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
) -> DPOResult:
    """The preference loss of every pair, a function of its margin: the chosen log-ratio minus the rejected one.

    Args:
        chosen_logps: (P,) summed completion log-probs of the chosen answers under the policy, with gradient.
        rejected_logps: (P,) the same for the rejected ones.
        ref_chosen_logps: (P,) the chosen answers under the reference.
        ref_rejected_logps: (P,) the same for the rejected ones.
        loss_type: one of :data:`DPO_LOSS_TYPES`. ``ipo`` pulls the margin of sums to 1 / (2 beta).
        beta: weight of the KL towards the reference; for ``ipo`` its tau.

    Raises:
        ValueError: unknown ``loss_type``.
    """
    if loss_type not in DPO_LOSS_TYPES:
        raise ValueError(f"loss_type {loss_type!r} is not one of {', '.join(DPO_LOSS_TYPES)}")
    chosen, rejected = chosen_logps - ref_chosen_logps.detach(), rejected_logps - ref_rejected_logps.detach()
    margins = chosen - rejected
    losses = (margins - 1 / (2 * beta)) ** 2 if loss_type == "ipo" else -F.logsigmoid(beta * margins)
    return DPOResult(losses, beta * chosen.detach(), beta * rejected.detach())
