"""DPO on preference pairs, whose completions are compared by their log-ratios to a reference model."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from alignment.data.batching import Batch
from alignment.data.kinds.pairs import PAIRS, PreferenceBatch
from alignment.data.report import DataReport
from alignment.engines.scoring import SequenceOutput
from alignment.methods.dpo_options import DPOConfig
from alignment.methods.losses import check_values
from alignment.objectives.dpo import dpo_loss
from alignment.references.base import RowIds
from alignment.reporting.metrics import REWARDS, add_rewards, add_sides, sides
from alignment.training.advice import about_learning_rate, about_window
from alignment.training.method import Method, RowLosses, Window
from alignment.training.trainer import AlignmentTrainer


class DPOMethod(Method[PreferenceBatch]):
    """Scores both completions of every pair with the reference in one pass, then with the policy."""

    kind = PAIRS
    metrics = (*REWARDS, *sides("logps", "logits"), "entropy")
    options: DPOConfig

    @property
    def needs_reference(self) -> bool:
        return True

    def advice(self, report: DataReport, window_rows: int) -> list[str]:
        options = self.options
        rate = about_learning_rate(options, options.beta, adapters=self.trains_adapters)
        return rate + about_window(options, window_rows)

    def scored(self, batch: PreferenceBatch) -> Batch:
        return batch.pairs

    def reference_sequences(self, batch: PreferenceBatch, dataset: str) -> tuple[Batch, RowIds]:
        return batch.pairs, RowIds(dataset, batch.rows)

    def before_training(self, window: Window[PreferenceBatch]) -> list[Tensor]:
        return window.reference_logps(self.reference_sequences)

    def losses(
        self,
        batch: PreferenceBatch,
        index: int,
        output: SequenceOutput,
        known: list[Tensor],
        window: Window[PreferenceBatch],
    ) -> RowLosses:
        pairs, logps, reference, sums = len(batch.rows), output.scores, known[index], window.sums
        assert output.entropy is not None and output.logits is not None
        lengths = batch.pairs.lengths.to(logps.device)
        local, rows = logps.new_zeros(()), logps.new_zeros(pairs)
        for name, weight in self.options.losses:
            loss = self.options.LOSSES[name]
            result = dpo_loss(
                logps[:pairs],
                logps[pairs:],
                reference[:pairs],
                reference[pairs:],
                loss,
                beta=self.options.beta,
                lengths=(lengths[:pairs], lengths[pairs:]),
                **loss.options(self.options),
            )
            check_values(name, result.losses, pairs)
            count = window.counts.first_completion_tokens if loss.per_token else window.counts.rows
            local = local + weight * (result.losses.sum() / count)
            rows = rows + weight * result.losses.detach()
        add_rewards(sums, result.chosen_rewards, result.rejected_rewards)
        add_sides(sums, "logps", logps)
        add_sides(sums, "logits", output.logits, lengths)
        sums.add("entropy", output.entropy.sum(), lengths.sum())
        return RowLosses(local, rows)


class DPOTrainer(AlignmentTrainer):
    """Trainer for DPO and related losses on ``chosen, rejected`` pairs, with or without a prompt.

    Takes the arguments of :class:`~alignment.training.trainer.AlignmentTrainer`.
    """

    config_class: ClassVar[type[DPOConfig]] = DPOConfig
    method_class = DPOMethod
    takes_reference = True
