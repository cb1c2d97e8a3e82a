"""Build pairs from ranked completions, and micro-batches from the pairs of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alignment.data.kinds.pairs import PreferenceBatch, collate_pairs
from alignment.data.windows import RowTable, WindowPlan, plan_window
from alignment.online.completions import Generated
from alignment.online.ranking import Ranking


@dataclass(frozen=True)
class Pair:
    """Two completions of a prompt, the better one first: token ids, the dataset's row, and scores if available."""

    row: int
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    scores: tuple[float, float] | None


@dataclass(frozen=True)
class RankedBatch(PreferenceBatch):
    """A micro-batch of pairs with beta and the scores of its 2P sequences; None without pairs or with a judge."""

    scores: Tensor | None = None
    beta: float = 0.0


def pair_of(group: Generated, ranking: Ranking) -> Pair | None:
    """Return the pair to train on, or None if the prompt is dropped."""
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
    pairs: Sequence[Pair], window: WindowPlan, *, world_size: int, batch_size: int, max_tokens: int | None, packs: bool
) -> WindowPlan:
    """Plan micro-batches for the pairs of all ranks, in the same order on every rank; row ids are pair indices."""
    lengths = np.array([(len(p.prompt), len(p.chosen), len(p.rejected)) for p in pairs], dtype=np.int64).reshape(-1, 3)
    numbers = np.arange(len(pairs), dtype=np.int64)
    return plan_window(
        RowTable(prompt=lengths[:, 0], completions=lengths[:, 1:]),
        numbers,
        np.full_like(numbers, -1),
        world_size=world_size,
        batch_size=batch_size,
        max_tokens=max_tokens,
        packs=packs,
        epoch=window.epoch,
        step=window.step,
    )


def ranked_batches(pairs: Sequence[Pair], plan: WindowPlan, rank: int, beta: float) -> list[RankedBatch]:
    """Return one rank's micro-batches of a plan from :func:`plan_pairs`; their row ids are those of the dataset."""
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
        known = torch.tensor(flat, dtype=torch.float32) if flat else None
        batches.append(RankedBatch(rows=batch.rows, pairs=batch.pairs, scores=known, beta=beta))
    return batches
