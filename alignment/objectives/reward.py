"""The Bradley-Terry loss for training reward models on pairs.

Bradley and Terry, "Rank Analysis of Incomplete Block Designs", Biometrika 1952, https://doi.org/10.2307/2334029.
Margins: Touvron et al., Llama 2, section 3.2.2, https://arxiv.org/abs/2307.09288.
Centering: Eisenstein et al., "Helping or Herding?", https://arxiv.org/abs/2312.09244.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from alignment.objectives.pairs import PairResult


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margins: Tensor | None = None, center: float | None = None
) -> PairResult:
    """Compute the negative log-likelihood that the chosen completion of every pair wins by at least its margin.

    Args:
        chosen: (P,) rewards of the chosen completions, differentiable.
        rejected: (P,) rewards of the rejected completions, differentiable.
        margins: (P,) margins by which the chosen completions are better; None for 0.
        center: weight of a pair's squared sum of rewards, which keeps the mean reward near 0; None for no centering.
    """
    difference = chosen - rejected if margins is None else chosen - rejected - margins
    losses = -F.logsigmoid(difference)
    if center is not None:
        losses = losses + center * (chosen + rejected) ** 2
    return PairResult(losses, chosen.detach(), rejected.detach())
