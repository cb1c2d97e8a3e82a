"""Contrastive Preference Optimization (CPO) and related losses of pairs, which need no reference.

CPO: Xu et al., https://arxiv.org/abs/2401.08417. The table :data:`LOSSES` names the other papers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alignment.objectives.pairs import PairResult, hinge, ipo, logistic, sigmoid
from alignment.objectives.table import ANY, BELOW_HALF, IPO, NOT_NEGATIVE, NOT_ZERO, SLIC, Loss

if TYPE_CHECKING:
    from torch import Tensor


def shaped(logps: Tensor, alpha: float) -> Tensor:
    """Return AlphaPO's reward ``(1 - p^-alpha) / alpha`` of length-normalized log-probs; log p if alpha is 0."""
    if alpha == 0.0:
        return logps
    # expm1 avoids the loss of precision of 1 - exp(...) for small alpha.
    return -(-alpha * logps).expm1() / alpha


def simpo(
    chosen: Tensor,
    rejected: Tensor,
    beta: float,
    simpo_gamma: float = 0.5,
    label_smoothing: float = 0.0,
    alpha: float = 0.0,
) -> Tensor:
    """Return the sigmoid loss with a target margin of ``simpo_gamma`` and a reward that ``alpha`` shapes."""
    margins = shaped(chosen, alpha) - shaped(rejected, alpha)
    return logistic(margins - simpo_gamma / beta, beta, label_smoothing)


_READ_BY_SIMPO = {"label_smoothing": BELOW_HALF, "simpo_gamma": NOT_NEGATIVE, "alpha": ANY}
LOSSES = {
    "sigmoid": Loss(sigmoid, None, {"label_smoothing": BELOW_HALF}),
    "hinge": Loss(hinge, SLIC),
    "ipo": Loss(ipo, IPO, needs=("lengths",)),
    "simpo": Loss(
        simpo,
        ("SimPO: Simple Preference Optimization with a Reference-Free Reward", "https://arxiv.org/abs/2405.14734"),
        _READ_BY_SIMPO,
        ("lengths",),
    ),
    "alphapo": Loss(
        simpo,
        ("AlphaPO: Reward Shape Matters for LLM Alignment", "https://arxiv.org/abs/2501.03884"),
        {**_READ_BY_SIMPO, "alpha": NOT_ZERO},  # with 0, it is simpo
        ("lengths",),
        defaults={"alpha": 0.25, "cpo_alpha": 0.0},
    ),
}


def cpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    loss: Loss = LOSSES["sigmoid"],
    *,
    beta: float = 0.1,
    **options: float,
) -> PairResult:
    """Compute a loss of every pair. Values of options are not checked.

    The caller adds the NLL term (``cpo_alpha`` times ``nll``).

    Args:
        chosen_logps: (P,) summed log-probs of the chosen completions, differentiable.
        rejected_logps: (P,) summed log-probs of the rejected completions, differentiable.
        chosen_lengths: (P,) number of tokens of the chosen completions.
        rejected_lengths: (P,) number of tokens of the rejected completions.
        loss: an entry of :data:`LOSSES`.
        beta: inverse temperature; tau for ``ipo``.
        **options: the options that the loss reads.
    """
    chosen, rejected = chosen_logps, rejected_logps
    if "lengths" in loss.needs:
        chosen, rejected = chosen / chosen_lengths, rejected / rejected_lengths
    losses = loss.function(chosen, rejected, beta, **options)
    good, bad = (shaped(side.detach(), options.get("alpha", 0.0)) for side in (chosen, rejected))
    return PairResult(losses, beta * good, beta * bad)
