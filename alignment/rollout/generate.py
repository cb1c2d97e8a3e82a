"""The ``generate`` backend: left-padded batches in lockstep, for every model and every logits processor.

Attention masks padding, but a logits processor sees it like any other token. If EOS is also the padding token, as is
common, ``no_repeat_ngram_size: 1`` would prevent the shorter prompts from ending. No token is safe to pad with, since
each may be part of a sequence that a processor looks for. Processors that read tokens therefore get the rows without
padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    StoppingCriteriaList,
    WatermarkLogitsProcessor,
)

from alignment.internals.transformers import changed_processors, knows_padding
from alignment.rollout.backend import Completion, Generation, RolloutBackend, Work
from alignment.rollout.processors import generation_config

# The others read only the scores, or only the number of tokens including padding.
_READERS = (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,  # also used for bad words
    WatermarkLogitsProcessor,
)


class _WithoutPadding(LogitsProcessor):
    """Calls a processor on the rows without their padding, grouped by length.

    Args:
        inner: the processor; must not hold state per row.
        padding: number of padding tokens on the left of each row of the batch.
    """

    def __init__(self, inner: LogitsProcessor, padding: Sequence[int], device: torch.device) -> None:
        self.inner = inner
        self._rows = {
            skipped: torch.tensor([row for row, own in enumerate(padding) if own == skipped], device=device)
            for skipped in sorted(set(padding))
        }

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, V) processed scores of (B, T) tokens."""
        result = torch.empty_like(scores)
        for skipped, rows in self._rows.items():
            result[rows] = self.inner(input_ids[rows, skipped:], scores[rows]).to(result.dtype)
        return result


def _padding_unseen(
    model: PreTrainedModel, padding: Sequence[int], device: torch.device
) -> AbstractContextManager[None]:
    """Hide padding, within this context, from the processors that ``model.generate`` creates for a batch."""

    def without_padding(one: LogitsProcessor) -> LogitsProcessor:
        # Since release 5.23, transformers tells the repetition penalty itself how long each row's padding is.
        reads = isinstance(one, _READERS) and not knows_padding(one)
        return _WithoutPadding(one, padding, device) if reads else one

    return changed_processors(model, without_padding) if any(padding) else nullcontext()


class GenerateBackend(RolloutBackend):
    """Generates with ``model.generate``; works with every model."""

    name = "generate"

    def generate(self, chunk: Sequence[Work], generation: Generation) -> list[list[Completion]]:
        """See :class:`RolloutBackend`."""
        sampling, device = generation.sampling, generation.device
        rows = [work.ids for work in chunk for _ in range(work.count)]
        width = max(map(len, rows))
        padding = [width - len(row) for row in rows]
        padded = [[sampling.pad_token_id] * left + list(row) for left, row in zip(padding, rows)]
        mask = [[0] * left + [1] * len(row) for left, row in zip(padding, rows)]

        def ticked(input_ids: Tensor, scores: Any, **more: Any) -> Tensor:
            """Called by transformers after each token; stops no row."""
            generation.tick()
            return torch.zeros(len(input_ids), dtype=torch.bool, device=device)

        with _padding_unseen(generation.model, padding, device):
            output = generation.model.generate(
                torch.tensor(padded, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=generation_config(sampling),
                stopping_criteria=StoppingCriteriaList([ticked]),
                synced_gpus=generation.by_layer,
            )
        done = iter([Completion.cut(row, sampling) for row in output[:, width:].tolist()])
        return [[next(done) for _ in range(work.count)] for work in chunk]
