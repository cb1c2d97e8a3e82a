"""The negative log-likelihood of completions: the SFT loss, and the second term of the CPO loss."""

from __future__ import annotations

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

    Wu et al., "On the Generalization of SFT", equation 9, https://arxiv.org/abs/2508.05629.

    Args:
        token_logps: (N,) log-probs of the target tokens.
    """
    return -token_logps.detach().exp() * token_logps
