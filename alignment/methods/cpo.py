"""CPO and its variants: preference pairs, no reference model."""

from __future__ import annotations

from typing import Any, ClassVar

from alignment.data.batching import Batch
from alignment.data.kinds.pairs import PAIRS, PreferenceBatch
from alignment.data.report import DataReport
from alignment.engines.scoring import SequenceOutput
from alignment.methods.cpo_options import CPOConfig
from alignment.methods.losses import check_values
from alignment.objectives.cpo import cpo_loss
from alignment.objectives.likelihood import nll
from alignment.reporting.metrics import REWARDS, add_rewards, add_sides, sides
from alignment.training.advice import about_learning_rate, about_window
from alignment.training.method import Method, RowLosses, Window
from alignment.training.trainer import AlignmentTrainer


class CPOMethod(Method[PreferenceBatch]):
    """Scores both completions of every pair in one forward pass; averages the NLL over the window's chosen tokens."""

    kind = PAIRS
    metrics = (*REWARDS, *sides("logps", "logits"), "nll_loss", "entropy")
    options: CPOConfig

    def advice(self, report: DataReport, window_rows: int) -> list[str]:
        options = self.options
        rate = about_learning_rate(options, options.beta, adapters=self.trains_adapters)
        return rate + about_window(options, window_rows)

    def scored(self, batch: PreferenceBatch) -> Batch:
        return batch.pairs

    def losses(
        self, batch: PreferenceBatch, index: int, output: SequenceOutput, known: Any, window: Window[PreferenceBatch]
    ) -> RowLosses:
        options, pairs, logps, sums = self.options, len(batch.rows), output.scores, window.sums
        assert output.entropy is not None and output.logits is not None
        lengths, loss = batch.pairs.lengths.to(logps.device), options.LOSSES[options.loss_type]
        result = cpo_loss(
            logps[:pairs],
            logps[pairs:],
            lengths[:pairs],
            lengths[pairs:],
            loss,
            beta=options.beta,
            **loss.options(options),
        )
        check_values(options.loss_type, result.losses, pairs)
        nll_sum, nll_count = nll(logps[:pairs], lengths[:pairs])
        shown = logps.detach() / lengths if "lengths" in loss.needs else logps
        add_rewards(sums, result.chosen_rewards, result.rejected_rewards)
        add_sides(sums, "logps", shown)
        add_sides(sums, "logits", output.logits, lengths)
        sums.add("nll_loss", nll_sum, nll_count)
        sums.add("entropy", output.entropy.sum(), lengths.sum())
        local = result.losses.sum() / window.counts.rows
        if options.cpo_alpha:
            local = local + options.cpo_alpha * nll_sum / window.counts.first_completion_tokens
        return RowLosses(local, result.losses.detach())


class CPOTrainer(AlignmentTrainer):
    """Trainer for CPO, SimPO, AlphaPO, IPO and the hinge loss on ``chosen, rejected`` pairs, with or without a prompt.

    Takes the arguments of :class:`~alignment.training.trainer.AlignmentTrainer`.
    """

    config_class: ClassVar[type[CPOConfig]] = CPOConfig
    method_class = CPOMethod
