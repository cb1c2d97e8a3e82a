"""Supervised fine-tuning: the likelihood of given answers, on the same loop and engines as the preference methods."""

from __future__ import annotations

from typing import Any, ClassVar

from alignment.data.batching import Batch, Collate, SingleBatch, collate_single
from alignment.engines.scoring import SequenceScores
from alignment.methods.sft_options import SFTConfig
from alignment.objectives.likelihood import nll
from alignment.trainers.base import AlignmentTrainer
from alignment.trainers.method import Method, RowLosses, Window


class SFTMethod(Method[SingleBatch]):
    """The loss is the mean over the answers' tokens of the whole window."""

    kind = "single"
    completions = ("completion_ids",)
    metrics = ("entropy", "mean_token_accuracy")
    options: SFTConfig

    @property
    def collate(self) -> Collate:
        return collate_single

    def scored(self, batch: SingleBatch) -> Batch:
        return batch.answers

    def losses(
        self, batch: SingleBatch, index: int, scores: SequenceScores, known: Any, window: Window[SingleBatch]
    ) -> RowLosses:
        assert scores.entropy is not None and scores.top1 is not None
        lengths = batch.answers.lengths.to(scores.logps.device)
        total, tokens = nll(scores.logps, lengths)
        window.sums.add("entropy", scores.entropy.sum(), tokens)
        window.sums.add("mean_token_accuracy", scores.top1.sum(), tokens)
        return RowLosses(total / window.counts.first_completion_tokens, -scores.logps.detach() / lengths)


class SFTTrainer(AlignmentTrainer):
    """Trains on ``prompt, completion`` rows, on ``messages`` whose last one is the answer, or on ``text``.

    The arguments are those of :class:`~alignment.trainers.base.AlignmentTrainer`.
    """

    config_class: ClassVar[type[SFTConfig]] = SFTConfig
    method_class = SFTMethod
