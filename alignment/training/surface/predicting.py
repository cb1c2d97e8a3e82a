"""Scores of a reward model for the rows of a dataset."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alignment.data.kinds.pairs import PreferenceBatch
from alignment.engines.collectives import gathered
from alignment.training.context import RunContext
from alignment.training.data import PreparedData
from alignment.training.evaluation import evaluation_window
from alignment.training.window import WindowPass


def pair_scores(context: RunContext, window_pass: WindowPass, data: PreparedData) -> NDArray[np.float32]:
    """Return (R, 2) fp32 scores of the chosen and the rejected completion of each tokenized row. Collective.

    Args:
        context: a run whose batches are pairs.
        window_pass: the window pass of the model that scores them.
        data: the rows.
    """
    policy = window_pass.models.policy
    own: dict[int, tuple[np.float32, np.float32]] = {}
    for batch in evaluation_window(context, data)[1]:
        assert isinstance(batch, PreferenceBatch)
        with policy.inference():
            scores = policy.sequence_scores(context.method.scored(batch)).cpu().numpy().astype(np.float32)
        pairs = len(batch.rows)
        own |= dict(zip(batch.rows, zip(scores[:pairs], scores[pairs:], strict=True), strict=True))
    everyone = {row: pair for part in gathered(own) for row, pair in part.items()}
    return np.array([everyone[row] for row in range(len(data.table))], dtype=np.float32)
