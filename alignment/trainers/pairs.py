"""From ranked completions to the pairs of a window, and from the pairs of all ranks to micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alignment.data.batching import PairedBatch, collate_pairs
from alignment.data.windows import RowTable, WindowPlan, plan_window
from alignment.trainers.generations import Generated

# Why a prompt gives no pair. A tie has no better side: trained on, it would teach whatever came first.
TIED, IDENTICAL, UNSCORED, FAILED = "tied", "identical", "unscored", "failed"
REASONS = (TIED, IDENTICAL, UNSCORED, FAILED)


@dataclass(frozen=True)
class Ranking:
    """What was found of one prompt's completions.

    Attributes:
        outcome: the numbers of the better and the worse completion, or one of :data:`REASONS`.
        scores: of every completion; None where it has none, or altogether where a judge decided.
    """

    outcome: tuple[int, int] | str
    scores: tuple[float | None, ...] | None = None


@dataclass(frozen=True)
class Pair:
    """Two completions of a prompt, the better one first: token ids, the dataset's row, and scores if there are any."""

    row: int
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    scores: tuple[float, float] | None


@dataclass(frozen=True)
class RankedBatch(PairedBatch):
    """A micro-batch of pairs with its beta, and the scores of its 2P sequences; None without pairs or by a judge."""

    scores: Tensor | None = None
    beta: float = 0.0


def best_and_worst(scores: Sequence[float | None], texts: Sequence[str]) -> Ranking:
    """The best completion against the worst one, by score; of those with different texts.

    One text may have two scores: for how it ended, or from a source that is not sure of itself.
    """
    scored = [(score, number) for number, score in enumerate(scores) if score is not None]
    if len(scored) < 2:
        return Ranking(UNSCORED, tuple(scores))
    gaps = [
        (high - low, better, worse)
        for high, better in scored
        for low, worse in scored
        if high > low and texts[better] != texts[worse]
    ]
    if gaps:
        _, better, worse = max(gaps, key=lambda entry: entry[0])
        return Ranking((better, worse), tuple(scores))
    return Ranking(TIED if len({texts[number] for _, number in scored}) > 1 else IDENTICAL, tuple(scores))


def pair_of(group: Generated, ranking: Ranking) -> Pair | None:
    """The pair to learn from, or None where the outcome is a reason not to."""
    if isinstance(ranking.outcome, str):
        return None
    better, worse = ranking.outcome
    scores = None
    if ranking.scores is not None:
        high, low = ranking.scores[better], ranking.scores[worse]
        assert high is not None and low is not None
        scores = high, low
    ids = [group.completions[number].ids for number in (better, worse)]
    return Pair(group.row, group.prompt, tuple(ids[0]), tuple(ids[1]), scores)


def plan_pairs(
    pairs: Sequence[Pair], window: WindowPlan, *, world_size: int, batch_size: int, max_tokens: int | None
) -> WindowPlan:
    """The micro-batches of the pairs of all ranks, in an order that every rank knows; rows are numbers of pairs."""
    lengths = np.array([(len(p.prompt), len(p.chosen), len(p.rejected)) for p in pairs], dtype=np.int64).reshape(-1, 3)
    numbers = np.arange(len(pairs), dtype=np.int64)
    return plan_window(
        RowTable(prompt=lengths[:, 0], completions=lengths[:, 1:]),
        numbers,
        np.full_like(numbers, -1),
        world_size=world_size,
        batch_size=batch_size,
        max_tokens=max_tokens,
        epoch=window.epoch,
        step=window.step,
    )


def ranked_batches(pairs: Sequence[Pair], plan: WindowPlan, rank: int, beta: float) -> list[RankedBatch]:
    """One rank's micro-batches of a plan of :func:`plan_pairs`; their rows are those of the dataset."""
    batches = []
    for micro, shares in enumerate(plan.micro_batches):
        own = [pairs[number] for number in shares[rank].rows]
        batch = collate_pairs(
            tuple(pair.row for pair in own),
            [(pair.prompt, pair.chosen, pair.rejected) for pair in own],
            plan.longest[micro],
        )
        scores = [pair.scores for pair in own if pair.scores is not None]
        flat = [pair[side] for side in range(2) for pair in scores]
        batches.append(
            RankedBatch(
                rows=batch.rows,
                pairs=batch.pairs,
                scores=torch.tensor(flat, dtype=torch.float32) if flat else None,
                beta=beta,
            )
        )
    return batches
