"""The negative log-likelihood of completions: the SFT losses, and the second term of the CPO loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alignment.objectives.table import Loss

if TYPE_CHECKING:
    from torch import Tensor


def nll(chosen_logps: Tensor, chosen_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed negative log-likelihood of the chosen completions (differentiable), and their token count.

    Args:
        chosen_logps: (P,) summed completion log-probs.
        chosen_lengths: (P,) number of tokens of each completion.
    """
    return -chosen_logps.sum(), chosen_lengths.sum().to(chosen_logps.dtype)


def dft(token_logps: Tensor) -> Tensor:
    """Compute (N,) token losses of dynamic fine-tuning (DFT), each weighted by the token's detached probability.

    Equation 9 of the paper.

    Args:
        token_logps: (N,) log-probs of the target tokens.
    """
    return -token_logps.detach().exp() * token_logps


def negative(logps: Tensor) -> Tensor:
    """Return the negative log-likelihoods of sequences, from their log-probs."""
    return -logps


# The formulas take (S,) summed log-probs of sequences, or (N,) log-probs of tokens if they need them.
LOSSES = {
    "nll": Loss(negative, per_token=True),
    "chunked_nll": Loss(negative, per_token=True),
    "dft": Loss(
        dft,
        (
            "On the Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification",
            "https://arxiv.org/abs/2508.05629",
        ),
        needs=("tokens",),
        per_token=True,
    ),
}
