"""CPO and its relatives: pairs of answers, no reference model."""

from __future__ import annotations

from typing import Any, ClassVar

from alignment.config.cpo import CPOConfig
from alignment.data.batching import AnyBatch, Batch, Collate, PairedBatch, collate_paired
from alignment.data.windows import WindowCounts
from alignment.engines.scoring import SequenceScores
from alignment.objectives.cpo import LENGTH_NORMALISED, cpo_loss
from alignment.objectives.likelihood import nll
from alignment.reporting.metrics import MetricSums
from alignment.trainers.base import AlignmentTrainer
from alignment.trainers.method import Method, RowLosses


class CPOMethod(Method):
    """One forward scores both answers of every pair; the NLL is a mean over the chosen tokens of the whole window."""

    name = "cpo"
    kind = "paired"
    completions = ("chosen_ids", "rejected_ids")
    metrics = (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "logps/chosen",
        "logps/rejected",
        "logits/chosen",
        "logits/rejected",
        "nll_loss",
        "entropy",
    )
    options: CPOConfig

    @property
    def collate(self) -> Collate:
        return collate_paired

    def scored(self, batch: AnyBatch) -> Batch:
        assert isinstance(batch, PairedBatch)
        return batch.pairs

    def losses(
        self, batch: AnyBatch, index: int, scores: SequenceScores, swept: Any, counts: WindowCounts, sums: MetricSums
    ) -> RowLosses:
        assert isinstance(batch, PairedBatch)
        options, pairs, logps = self.options, len(batch.rows), scores.logps
        assert scores.entropy is not None and scores.logits is not None
        lengths = batch.pairs.lengths.to(logps.device)
        result = cpo_loss(
            logps[:pairs],
            logps[pairs:],
            lengths[:pairs],
            lengths[pairs:],
            loss_type=options.loss_type,
            beta=options.beta,
            label_smoothing=options.label_smoothing,
            simpo_gamma=options.simpo_gamma,
            alpha=options.alpha or 0.0,
        )
        nll_sum, nll_count = nll(logps[:pairs], lengths[:pairs])
        shown = logps.detach() / lengths if options.loss_type in LENGTH_NORMALISED else logps
        won = (result.chosen_rewards > result.rejected_rewards).sum()
        for name, total, count in (
            ("rewards/chosen", result.chosen_rewards.sum(), pairs),
            ("rewards/rejected", result.rejected_rewards.sum(), pairs),
            ("rewards/accuracies", won, pairs),
            ("logps/chosen", shown[:pairs].sum(), pairs),
            ("logps/rejected", shown[pairs:].sum(), pairs),
            ("logits/chosen", scores.logits[:pairs].sum(), lengths[:pairs].sum()),
            ("logits/rejected", scores.logits[pairs:].sum(), lengths[pairs:].sum()),
            ("nll_loss", nll_sum, nll_count),
            ("entropy", scores.entropy.sum(), lengths.sum()),
        ):
            sums.add(name, total, count)
        local = result.losses.sum() / counts.rows
        if options.cpo_alpha:
            local = local + options.cpo_alpha * nll_sum / counts.first_completion_tokens
        return RowLosses(local, result.losses.detach())


class CPOTrainer(AlignmentTrainer):
    """Trains with CPO, SimPO, AlphaPO, IPO or the hinge loss on ``chosen, rejected`` pairs, with or without a prompt.

    The arguments are those of :class:`~alignment.trainers.base.AlignmentTrainer`.
    """

    config_class: ClassVar[type[CPOConfig]] = CPOConfig
    method_class = CPOMethod
