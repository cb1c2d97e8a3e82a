"""Direct Preference Optimization (DPO), offline and online: losses on the log-ratios of policy and reference.

DPO: Rafailov et al., https://arxiv.org/abs/2305.18290. IPO: Azar et al., https://arxiv.org/abs/2310.12036.
Hinge: SLiC, Zhao et al., https://arxiv.org/abs/2305.10425.
Label smoothing (conservative DPO): Mitchell, https://ericmitchell.ai/cdpo.pdf.
Online DPO, in which the policy generates both completions of a pair: Guo et al., https://arxiv.org/abs/2402.04792.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo")


class DPOResult(NamedTuple):
    """Per-pair results: ``losses`` (P,), differentiable; the rewards (P,) are detached.

    A reward is beta times the log-ratio of the completion, summed over its tokens for every loss, including ``ipo``.
    """

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
    label_smoothing: float = 0.0,
    lengths: tuple[Tensor, Tensor] | None = None,
) -> DPOResult:
    """Compute the preference loss of every pair from its margin, the chosen log-ratio minus the rejected log-ratio.

    Args:
        chosen_logps: (P,) summed log-probs of the chosen completions under the policy, differentiable.
        rejected_logps: (P,) summed log-probs of the rejected completions under the policy, differentiable.
        ref_chosen_logps: (P,) summed log-probs of the chosen completions under the reference.
        ref_rejected_logps: (P,) summed log-probs of the rejected completions under the reference.
        loss_type: one of :data:`DPO_LOSS_TYPES`. ``ipo`` drives the margin to 1 / (2 beta).
        beta: weight of the KL divergence from the reference; tau for ``ipo``.
        label_smoothing: probability that a pair's labels are swapped, below 0.5 (``sigmoid`` only).
        lengths: (P,) numbers of tokens of the chosen and of the rejected completions, at least 1. If given, ``ipo``
            uses means over tokens, as in offline DPO; otherwise sums, as in Online DPO. Other losses ignore them.

    Raises:
        ValueError: unknown ``loss_type``, or a ``label_smoothing`` that is out of range or has no effect.
    """
    if loss_type not in DPO_LOSS_TYPES:
        raise ValueError(f"loss_type {loss_type!r} is not one of {', '.join(DPO_LOSS_TYPES)}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing}: must be at least 0 and below 0.5")
    if label_smoothing and loss_type != "sigmoid":
        raise ValueError(
            f"label_smoothing={label_smoothing} only applies to loss_type 'sigmoid'; set it to 0 for {loss_type!r}"
        )
    chosen, rejected = chosen_logps - ref_chosen_logps.detach(), rejected_logps - ref_rejected_logps.detach()
    rewards = beta * chosen.detach(), beta * rejected.detach()
    if loss_type == "ipo" and lengths is not None:
        chosen, rejected = chosen / lengths[0], rejected / lengths[1]
    margins = chosen - rejected
    if loss_type == "hinge":
        losses = torch.relu(1 - beta * margins)
    elif loss_type == "ipo":
        losses = (margins - 1 / (2 * beta)) ** 2
    else:
        losses = -F.logsigmoid(beta * margins)
        if label_smoothing:
            losses = (1 - label_smoothing) * losses - label_smoothing * F.logsigmoid(-beta * margins)
    return DPOResult(losses, *rewards)
