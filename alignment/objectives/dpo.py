"""Direct Preference Optimization (DPO) on pairs: losses of the log-ratios of policy and reference.

DPO: Rafailov et al., https://arxiv.org/abs/2305.18290. The table :data:`LOSSES` names the other papers.

To add a loss, write its formula here and enter it in the table. See :mod:`alignment.objectives.pairs` for the
arguments of a formula.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from alignment.objectives.pairs import PairResult, hinge, ipo, sigmoid
from alignment.objectives.table import APO, BELOW_HALF, IPO, POSITIVE, SLIC, WITHIN_HALF, Loss, log_sigmoid

if TYPE_CHECKING:
    from torch import Tensor


def robust(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Return the unbiased estimate of the loss without noise, if labels are swapped with this probability."""
    margins = beta * (chosen - rejected)
    kept, swapped = -log_sigmoid(margins), -log_sigmoid(-margins)
    return ((1 - label_smoothing) * kept - label_smoothing * swapped) / (1 - 2 * label_smoothing)


def exo_pair(chosen: Tensor, rejected: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Return the KL divergence of the policy's preference from the smoothed label (equation 16)."""
    margins = beta * (chosen - rejected)
    wins, loses = log_sigmoid(margins), log_sigmoid(-margins)
    kept, swapped = math.log1p(-label_smoothing), math.log(label_smoothing)
    return margins.sigmoid() * (wins - kept) + (-margins).sigmoid() * (loses - swapped)


def nca_pair(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return the noise-contrastive loss, which also raises the chosen completion's likelihood itself."""
    good, bad = beta * chosen, beta * rejected
    return -log_sigmoid(good) - 0.5 * log_sigmoid(-good) - 0.5 * log_sigmoid(-bad)


def bco_pair(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return the loss of a classifier of chosen and rejected completions, without the paper's shift of rewards.

    The paper subtracts a running mean of rewards. As in TRL 1.16 it is 0 here: such a mean over batches would depend
    on their order and size.
    """
    return -log_sigmoid(beta * chosen) - log_sigmoid(-beta * rejected)


def sppo_hard(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return the squared distances of the log-ratios from 1 / (2 beta) and -1 / (2 beta): wins are certain."""
    return (chosen - 0.5 / beta) ** 2 + (rejected + 0.5 / beta) ** 2


def apo_zero(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return the loss that raises chosen and lowers rejected completions (equation 7)."""
    return (-beta * chosen).sigmoid() + (beta * rejected).sigmoid()


def apo_down(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return the loss that lowers chosen completions, and rejected ones more (equation 8)."""
    return (beta * chosen).sigmoid() + (beta * (rejected - chosen)).sigmoid()


def discopop(chosen: Tensor, rejected: Tensor, beta: float, discopop_tau: float) -> Tensor:
    """Return the blend of logistic and exponential loss (equation 5); ``discopop_tau`` is its temperature."""
    margins = beta * (chosen - rejected)
    blend = margins / discopop_tau
    # In one exponential: with exp(-margins) as a factor, a very negative margin would give infinity times 0.
    return -log_sigmoid(margins) * (-blend).sigmoid() + (log_sigmoid(blend) - margins).exp()


def sft(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return the summed negative log-likelihood of each chosen completion."""
    return -chosen


LOSSES = {
    "sigmoid": Loss(sigmoid, None, {"label_smoothing": BELOW_HALF}, ("reference",)),
    "hinge": Loss(hinge, SLIC, needs=("reference",)),
    "ipo": Loss(ipo, IPO, needs=("reference", "lengths")),
    "sigmoid_norm": Loss(
        sigmoid,
        ("Tulu 3: Pushing Frontiers in Open Language Model Post-Training", "https://arxiv.org/abs/2411.15124"),
        needs=("reference", "lengths"),
    ),
    "robust": Loss(
        robust,
        ("Provably Robust DPO: Aligning Language Models with Noisy Feedback", "https://arxiv.org/abs/2403.00409"),
        {"label_smoothing": BELOW_HALF},
        ("reference",),
    ),
    "exo_pair": Loss(
        exo_pair,
        ("Towards Efficient Exact Optimization of Language Model Alignment", "https://arxiv.org/abs/2402.00856"),
        {"label_smoothing": WITHIN_HALF},
        ("reference",),
    ),
    "nca_pair": Loss(
        nca_pair,
        ("Noise Contrastive Alignment of Language Models with Explicit Rewards", "https://arxiv.org/abs/2402.05369"),
        needs=("reference",),
    ),
    "bco_pair": Loss(
        bco_pair,
        ("Binary Classifier Optimization for Large Language Model Alignment", "https://arxiv.org/abs/2404.04656"),
        needs=("reference",),
    ),
    "sppo_hard": Loss(
        sppo_hard,
        ("Self-Play Preference Optimization for Language Model Alignment", "https://arxiv.org/abs/2405.00675"),
        needs=("reference",),
    ),
    "apo_zero": Loss(apo_zero, APO, needs=("reference",)),
    "apo_down": Loss(apo_down, APO, needs=("reference",)),
    "discopop": Loss(
        discopop,
        (
            "Discovering Preference Optimization Algorithms with and for Large Language Models",
            "https://arxiv.org/abs/2406.08414",
        ),
        {"discopop_tau": POSITIVE},
        ("reference",),
    ),
    "sft": Loss(sft, per_token=True),
}
# Online DPO compares sums, and has no options of its own: Guo et al., https://arxiv.org/abs/2402.04792.
ONLINE_LOSSES = {"sigmoid": Loss(sigmoid, needs=("reference",)), "ipo": Loss(ipo, IPO, needs=("reference",))}


def dpo_loss(
    chosen_logps: Tensor,
    rejected_logps: Tensor,
    ref_chosen_logps: Tensor,
    ref_rejected_logps: Tensor,
    loss: Loss = LOSSES["sigmoid"],
    *,
    beta: float = 0.1,
    lengths: tuple[Tensor, Tensor] | None = None,
    **options: float,
) -> PairResult:
    """Compute a loss of every pair. Values of options are not checked.

    Args:
        chosen_logps: (P,) summed log-probs of the chosen completions under the policy, differentiable.
        rejected_logps: (P,) summed log-probs of the rejected completions under the policy, differentiable.
        ref_chosen_logps: (P,) summed log-probs of the chosen completions under the reference.
        ref_rejected_logps: (P,) summed log-probs of the rejected completions under the reference.
        loss: an entry of :data:`LOSSES` or :data:`ONLINE_LOSSES`.
        beta: weight of the KL divergence from the reference; tau for ``ipo``.
        lengths: (P,) numbers of tokens of the chosen and of the rejected completions, at least 1, for losses that
            need them.
        **options: the options that the loss reads.

    Returns:
        Losses and rewards. A reward is beta times the log-ratio of the completion, summed over its tokens for every
        loss.
    """
    ratios = chosen_logps - ref_chosen_logps.detach(), rejected_logps - ref_rejected_logps.detach()
    chosen, rejected = ratios if "reference" in loss.needs else (chosen_logps, rejected_logps)
    if "lengths" in loss.needs:
        assert lengths is not None
        chosen, rejected = chosen / lengths[0], rejected / lengths[1]
    losses = loss.function(chosen, rejected, beta, **options)
    return PairResult(losses, beta * ratios[0].detach(), beta * ratios[1].detach())
