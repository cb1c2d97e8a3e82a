"""The Bradley-Terry model of pairs, the objective of reward-model training.

Bradley and Terry, "Rank Analysis of Incomplete Block Designs", Biometrika 1952, https://doi.org/10.2307/2334029.
Margins: Touvron et al., Llama 2, section 3.2.2, https://arxiv.org/abs/2307.09288.
Centring: Eisenstein et al., "Helping or Herding?", https://arxiv.org/abs/2312.09244.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class RewardResult(NamedTuple):
    """Per-pair results: ``losses`` (P,) with gradient; the rewards (P,) are detached."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margins: Tensor | None = None, center: float | None = None
) -> RewardResult:
    """The negative log-likelihood that the chosen answer of every pair wins, as if it were worse by its margin.

    Args:
        chosen: (P,) rewards of the chosen answers, with gradient.
        rejected: (P,) the same for the rejected ones.
        margins: (P,) by how much the chosen answers are better; None for 0.
        center: weight of the square of a pair's sum of rewards, which keeps their mean at 0; None for none.
    """
    difference = chosen - rejected if margins is None else chosen - rejected - margins
    losses = -F.logsigmoid(difference)
    if center is not None:
        losses = losses + center * (chosen + rejected) ** 2
    return RewardResult(losses, chosen.detach(), rejected.detach())
