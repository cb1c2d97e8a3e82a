"""Supervised fine-tuning: the likelihood of given answers, on the same loop and engines as the preference methods."""

from __future__ import annotations

from typing import Any, ClassVar

from alignment.data.batching import Batch, Collate, CompletionBatch, collate_completion
from alignment.data.shown.rows import Columns, as_language_modelling
from alignment.engines.scoring import SequenceOutput
from alignment.methods.sft_options import SFTConfig
from alignment.objectives.likelihood import nll
from alignment.training.method import Method, RowLosses, Window
from alignment.training.trainer import AlignmentTrainer


class SFTMethod(Method[CompletionBatch]):
    """The loss is the mean over the answers' tokens of the whole window."""

    kind = "prompt_completion"
    completions = ("completion_ids",)
    metrics = ("entropy", "mean_token_accuracy")
    options: SFTConfig

    @property
    def collate(self) -> Collate:
        return collate_completion

    def shown(self, rows: Columns) -> dict[str, list[Any]]:
        return as_language_modelling(rows)

    def scored(self, batch: CompletionBatch) -> Batch:
        return batch.completions

    def losses(
        self, batch: CompletionBatch, index: int, output: SequenceOutput, known: Any, window: Window[CompletionBatch]
    ) -> RowLosses:
        assert output.entropy is not None and output.top1 is not None
        lengths = batch.completions.lengths.to(output.scores.device)
        total, tokens = nll(output.scores, lengths)
        window.sums.add("entropy", output.entropy.sum(), tokens)
        window.sums.add("mean_token_accuracy", output.top1.sum(), tokens)
        return RowLosses(total / window.counts.first_completion_tokens, -output.scores.detach() / lengths)


class SFTTrainer(AlignmentTrainer):
    """Trains on ``prompt, completion`` rows, on ``messages`` whose last one is the answer, or on ``text``.

    The arguments are those of :class:`~alignment.training.trainer.AlignmentTrainer`.
    """

    config_class: ClassVar[type[SFTConfig]] = SFTConfig
    method_class = SFTMethod
