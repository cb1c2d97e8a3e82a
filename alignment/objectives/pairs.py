"""Losses of pairs that several methods share, and the result of a loss.

The arguments are the (P,) scores of the chosen and of the rejected completions, ``beta``, and the options that the
loss reads; the result is the (P,) loss of each pair. A score is a log-ratio to the reference or a log-prob, summed or
averaged over tokens: the table of a method says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from alignment.objectives.table import log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


class PairResult(NamedTuple):
    """Per-pair results: ``losses`` (P,), differentiable; the rewards (P,) are detached."""

    losses: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def logistic(margins: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the (P,) negative log-likelihoods of preferences with these margins; see :func:`sigmoid`."""
    losses = -log_sigmoid(beta * margins)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * log_sigmoid(-beta * margins)
    return losses


def sigmoid(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return the negative log-likelihood of the preferences, which are swapped with probability ``label_smoothing``.

    Label smoothing: Mitchell, https://ericmitchell.ai/cdpo.pdf.
    """
    return logistic(chosen - rejected, beta, label_smoothing)


def hinge(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return the hinge loss, which is 0 for margins of at least 1 / beta."""
    return (1 - beta * (chosen - rejected)).relu()


def ipo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return the squared distance of the margin from 1 / (2 beta)."""
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margins: Tensor | None = None, center: float | None = None
) -> PairResult:
    """Compute the negative log-likelihood that the chosen completion of every pair wins by at least its margin.

    Bradley and Terry, "Rank Analysis of Incomplete Block Designs", Biometrika 1952, https://doi.org/10.2307/2334029.
    Margins: Touvron et al., Llama 2, section 3.2.2, https://arxiv.org/abs/2307.09288.
    Centering: Eisenstein et al., "Helping or Herding?", https://arxiv.org/abs/2312.09244.

    Args:
        chosen: (P,) rewards of the chosen completions, differentiable.
        rejected: (P,) rewards of the rejected completions, differentiable.
        margins: (P,) margins by which the chosen completions are better; None for 0.
        center: weight of a pair's squared sum of rewards, which keeps the mean reward near 0; None for no centering.
    """
    difference = chosen - rejected if margins is None else chosen - rejected - margins
    losses = -log_sigmoid(difference)
    if center is not None:
        losses = losses + center * (chosen + rejected) ** 2
    return PairResult(losses, chosen.detach(), rejected.detach())
