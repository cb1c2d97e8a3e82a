"""Entropy and mean logits of completion tokens, from the full matrix of logits in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from support.oracle.wide import wide_maths
from torch import Tensor, nn

Sequences = Iterable[tuple[Sequence[int], Sequence[int]]]


def sides_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return (prompt, completion) of the chosen and the rejected completions of labeled rows or pairs."""
    if "label" in rows[0]:
        named = [("chosen" if row["label"] else "rejected", row["prompt_ids"], row["completion_ids"]) for row in rows]
    else:
        named = [(side, row["prompt_ids"], row[f"{side}_ids"]) for row in rows for side in ("chosen", "rejected")]
    return {side: [(p, c) for name, p, c in named if name == side] for side in ("chosen", "rejected")}


@torch.no_grad()
def distribution_metrics(model: nn.Module, rows: Sequence[dict[str, Any]], max_length: int | None) -> dict[str, float]:
    """Return ``entropy`` over all completion tokens, and ``logits/chosen`` and ``logits/rejected`` for each side.

    ``objective/entropy`` is the mean over sequences of the sum over their tokens.
    """
    sides = {name: _logits(model, sequences, max_length) for name, sequences in sides_of(rows).items()}
    both = torch.cat(list(sides.values()))
    log_probs = torch.log_softmax(both, dim=-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    sequences = sum(map(len, sides_of(rows).values()))
    return {
        "entropy": float(entropy.mean()),
        "objective/entropy": float(entropy.sum() / sequences),
        **{f"logits/{name}": float(logits.mean()) for name, logits in sides.items()},
    }


def _logits(model: nn.Module, sequences: Sequences, max_length: int | None) -> Tensor:
    """Return (N, V) logits from which the completion tokens of all sequences are predicted."""
    parts = []
    for prompt, completion in sequences:
        ids = [*prompt, *completion][:max_length]
        with wide_maths():
            parts.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 : -1])
    return torch.cat(parts)
