"""The negative log-likelihood of given answers: SFT's loss, and the second term of CPO's."""

from __future__ import annotations

from torch import Tensor


def nll(chosen_logps: Tensor, chosen_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Sum (with gradient) of the negative log-likelihood of the chosen completions, and their number of tokens.

    Args:
        chosen_logps: (P,) summed completion log-probs.
        chosen_lengths: (P,) completion tokens of each.
    """
    return -chosen_logps.sum(), chosen_lengths.sum().to(chosen_logps.dtype)


def dft(token_logps: Tensor) -> Tensor:
    """(N,) losses of tokens, each weighted by its own probability, which has no gradient.

    Wu et al., "On the Generalization of SFT", equation 9, https://arxiv.org/abs/2508.05629.

    Args:
        token_logps: (N,) log-probs of the tokens to learn.
    """
    return -token_logps.detach().exp() * token_logps
