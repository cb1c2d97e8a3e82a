"""Logits processors that read tokens, and what stands left of a prompt that is shorter than others of its batch.

Attention masks padding; a processor sees it like any other token. Where the EOS is also the padding, as it often is,
``no_repeat_ngram_size: 1`` would forbid the shorter prompts to end. No token is a safe one to pad with: each may be
part of a sequence that a processor looks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    WatermarkLogitsProcessor,
)

from alignment.internals.transformers import changed_processors, knows_padding

# The others look at the scores alone, or at how many tokens there are, padding included.
_READERS = (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,  # bad words are such as well
    WatermarkLogitsProcessor,
)


class _WithoutPadding(LogitsProcessor):
    """A processor that is given the rows without their padding, those of equal length together.

    Args:
        inner: holds no state of single rows.
        padding: tokens of padding on the left of each row of the batch.
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


@contextlib.contextmanager
def padding_unseen(model: PreTrainedModel, padding: Sequence[int], device: torch.device) -> Iterator[None]:
    """Within this context no processor that ``model.generate`` makes for a batch reads its padding.

    Args:
        model: as it is called.
        padding: tokens of padding on the left of each row of the batch.
        device: of the batch.
    """
    if not any(padding):
        yield
        return

    def without_padding(one: LogitsProcessor) -> LogitsProcessor:
        return _WithoutPadding(one, padding, device) if _reads_padding(one) else one

    with changed_processors(model, without_padding):
        yield


def _reads_padding(processor: LogitsProcessor) -> bool:
    # From 5.23 on transformers tells the repetition penalty itself how long each row's padding is.
    return isinstance(processor, _READERS) and not knows_padding(processor)
