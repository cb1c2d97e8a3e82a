"""KTO and APO-zero: single answers with a label, judged against a reference model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from alignment.config.kto import KTOConfig
from alignment.data.batching import AnyBatch, Batch, Collate, UnpairedBatch, collate_unpaired
from alignment.data.windows import WindowCounts
from alignment.engines.collectives import sum_over_ranks
from alignment.engines.phases import Phases
from alignment.engines.scoring import SequenceScores
from alignment.objectives.kto import kto_kl, kto_loss
from alignment.reporting.metrics import MetricSums
from alignment.trainers.base import AlignmentTrainer
from alignment.trainers.method import Method, Models, RowLosses


class _Swept(NamedTuple):
    kl: Tensor
    reference: list[Tensor]


class KTOMethod(Method):
    """KTO's reference point is the KL of the *whole window*, estimated before any gradient is computed."""

    name = "kto"
    kind = "unpaired"
    completions = ("completion_ids",)
    metrics = (
        "kl",
        "entropy",
        *(f"{what}/{side}" for what in ("rewards", "logps", "logits") for side in ("chosen", "rejected")),
    )
    logs_sums = True
    reduced_windows = "windows_without_kl"
    options: KTOConfig

    @property
    def collate(self) -> Collate:
        return collate_unpaired

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def draws_partners(self) -> bool:
        return self.options.loss_type == "kto"

    @property
    def passes(self) -> int:
        return 3 if self.draws_partners else 2

    def check_window(self, counts: WindowCounts) -> str | None:
        if self.draws_partners and counts.partnered == 0:
            return "a window of one row has no partner to estimate the KL from: it used kl 0"
        return None

    def scored(self, batch: AnyBatch) -> Batch:
        assert isinstance(batch, UnpairedBatch)
        return batch.matched

    def sweep(
        self, batches: Sequence[AnyBatch], counts: WindowCounts, models: Models, sums: MetricSums, phases: Phases
    ) -> _Swept:
        assert models.reference is not None
        matched, mismatched = [], []
        with phases("reference") as record:
            for batch in batches:
                assert isinstance(batch, UnpairedBatch)
                record.tokens += batch.joint.tokens
                logps = models.reference.sequence_logps(batch.joint)
                matched.append(logps[: len(batch.rows)])
                mismatched.append(logps[len(batch.rows) :])
        ratios = torch.zeros(2, dtype=torch.float64, device=sums.values.device)
        if counts.partnered:
            with phases("kl") as record, models.policy.sweep():
                for batch, reference in zip(batches, mismatched):
                    assert isinstance(batch, UnpairedBatch)
                    record.tokens += batch.mismatched.tokens
                    policy = models.policy.sequence_logps(batch.mismatched)
                    ratios += torch.stack(kto_kl(policy.double(), reference.double()))
                sum_over_ranks(ratios)
        kl = (ratios[0] / ratios[1].clamp(min=1)).clamp(min=0)
        if self.draws_partners:
            sums.add_once("kl", kl)
        return _Swept(kl.float(), matched)

    def losses(
        self,
        batch: AnyBatch,
        index: int,
        scores: SequenceScores,
        swept: _Swept,
        counts: WindowCounts,
        sums: MetricSums,
    ) -> RowLosses:
        assert isinstance(batch, UnpairedBatch)
        logps, labels = scores.logps, batch.labels.to(scores.logps.device)
        result = kto_loss(
            logps,
            swept.reference[index],
            labels,
            swept.kl,
            loss_type=self.options.loss_type,
            beta=self.options.beta,
            desirable_weight=self.options.desirable_weight,
            undesirable_weight=self.options.undesirable_weight,
        )
        lengths = batch.matched.lengths.to(logps.device)
        assert scores.entropy is not None and scores.logits is not None
        sums.add("entropy", scores.entropy.sum(), lengths.sum())
        for name, members in (("chosen", labels), ("rejected", ~labels)):
            # Masked, not indexed: an index of unknown size would make the host wait for the device.
            rows, tokens = members.sum(), lengths.where(members, 0).sum()
            sums.add(f"rewards/{name}", result.rewards.where(members, 0).sum(), rows)
            sums.add(f"logps/{name}", logps.where(members, 0).sum(), rows)
            sums.add(f"logits/{name}", scores.logits.where(members, 0).sum(), tokens)
        return RowLosses(result.losses.sum() / counts.rows, result.losses.detach())


class KTOTrainer(AlignmentTrainer):
    """Trains with KTO or APO-zero on ``prompt, completion, label`` rows, or on pairs, which are split.

    The arguments are those of :class:`~alignment.trainers.base.AlignmentTrainer`.
    """

    config_class: ClassVar[type[KTOConfig]] = KTOConfig
    method_class = KTOMethod
