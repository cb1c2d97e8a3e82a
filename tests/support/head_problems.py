"""Small problems for the log-prob head, and their solutions in float64 with the full matrix of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from alignment.models.tiles.products import LogitTransform

TRANSFORMS = {
    "plain": LogitTransform(),
    "capped": LogitTransform(softcap=3.0),
    "scaled": LogitTransform(scale=0.25),
    "both": LogitTransform(scale=1.7, softcap=4.0),
}


def dense(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform) -> Tensor:
    """Compute the solution in float64 with autograd and the full matrix, without code of the package."""
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    return torch.log_softmax(logits, -1)[torch.arange(len(targets)), targets]


def dense_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, transform: LogitTransform
) -> Tensor:
    """Return (3, N) entropy, mean logit and whether the target was the most likely token, in float64."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return torch.stack((entropy, logits.mean(-1), (logits.argmax(-1) == targets).double()))


def problem(
    tokens: int, width: int, vocabulary: int, bias: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(vocabulary, width, generator=generator) * 0.5
    offset = torch.randn(vocabulary, generator=generator) if bias else None
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden, weight, offset, targets, torch.randn(tokens, generator=generator)
