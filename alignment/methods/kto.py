"""KTO and APO-zero: labeled completions, compared with a reference model."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from alignment.data.batching import Batch
from alignment.data.kinds.unpaired import UNPAIRED, UnpairedBatch
from alignment.data.report import DataReport
from alignment.data.windows import WindowCounts
from alignment.engines.collectives import sum_over_ranks
from alignment.engines.scoring import SequenceOutput
from alignment.methods.kto_options import KTOConfig
from alignment.objectives.kto import kto_kl, kto_loss
from alignment.references.base import RowIds
from alignment.reporting.metrics import sides
from alignment.training.advice import about_labels, about_learning_rate, about_window
from alignment.training.method import Items, Method, RowLosses, Window
from alignment.training.trainer import AlignmentTrainer


class _Known(NamedTuple):
    """What is known before training on a window.

    Attributes:
        kl: 0-dim, the KL estimate.
        reference: for each micro-batch, the reference's log-probs of the ``joint`` sequences.
    """

    kl: Tensor
    reference: list[Tensor]


class KTOMethod(Method[UnpairedBatch]):
    """Estimates KTO's reference point, the KL of the *whole window*, before it computes any gradient."""

    kind = UNPAIRED
    metrics = ("kl", "entropy", *sides("rewards", "logps", "logits"))
    untrained = ("mismatched", "joint")
    logs_sums = True
    reduced_windows = "windows_without_kl"
    options: KTOConfig

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def draws_partners(self) -> bool:
        return "kl" in self.options.LOSSES[self.options.loss_type].needs

    @property
    def passes(self) -> int:
        return 3 if self.draws_partners else 2

    def advice(self, report: DataReport, window_rows: int) -> list[str]:
        options = self.options
        sooner = " (with a smaller beta, at lower values too)"
        noisy = "KTO estimates the KL from these rows only" if self.draws_partners else None
        return [
            *about_labels(options, report, options.desirable_weight, options.undesirable_weight),
            *about_learning_rate(options, options.beta, sooner, adapters=self.trains_adapters),
            *about_window(options, window_rows, noisy),
        ]

    def check_window(self, counts: WindowCounts, items: Items) -> str | None:
        if self.draws_partners and counts.partnered == 0:
            return "a window with a single row has no other completion to estimate the KL from; its KL is set to 0"
        return None

    def scored(self, batch: UnpairedBatch) -> Batch:
        return batch.matched

    def reference_sequences(self, batch: UnpairedBatch, dataset: str) -> tuple[Batch, RowIds]:
        return batch.joint, RowIds(dataset, batch.rows, batch.partners)

    def before_training(self, window: Window[UnpairedBatch]) -> _Known:
        logps = window.reference_logps(self.reference_sequences)
        total = torch.zeros((), dtype=torch.float64, device=window.sums.values.device)
        if window.counts.partnered:
            policy = window.models.policy
            with window.phases("kl") as record, policy.inference():
                for batch, reference in zip(window.batches, logps):
                    record.tokens += batch.mismatched.tokens
                    scores = policy.forward(batch.mismatched).scores.double()
                    total += (scores - reference[len(batch.rows) :].double()).sum()
                sum_over_ranks(total)
        kl = kto_kl(total, window.counts.partnered)
        if self.draws_partners:
            window.sums.add_once("kl", kl)
        return _Known(kl.float(), logps)

    def losses(
        self, batch: UnpairedBatch, index: int, output: SequenceOutput, known: _Known, window: Window[UnpairedBatch]
    ) -> RowLosses:
        logps, labels, sums = output.scores, batch.labels.to(output.scores.device), window.sums
        loss = self.options.LOSSES[self.options.loss_type]
        result = kto_loss(
            logps,
            known.reference[index][: len(batch.rows)],
            labels,
            known.kl,
            beta=self.options.beta,
            **loss.options(self.options),
        )
        lengths = batch.matched.lengths.to(logps.device)
        assert output.entropy is not None and output.logits is not None
        sums.add("entropy", output.entropy.sum(), lengths.sum())
        for name, members in (("chosen", labels), ("rejected", ~labels)):
            # Masked instead of indexed: a result of unknown size would synchronize the host with the device.
            rows, tokens = members.sum(), lengths.where(members, 0).sum()
            sums.add(f"rewards/{name}", result.rewards.where(members, 0).sum(), rows)
            sums.add(f"logps/{name}", logps.where(members, 0).sum(), rows)
            sums.add(f"logits/{name}", output.logits.where(members, 0).sum(), tokens)
        return RowLosses(result.losses.sum() / window.counts.rows, result.losses.detach())


class KTOTrainer(AlignmentTrainer):
    """Trainer for KTO and APO-zero on ``prompt, completion, label`` rows, or on pairs, which are split into rows.

    Takes the arguments of :class:`~alignment.training.trainer.AlignmentTrainer`.
    """

    config_class: ClassVar[type[KTOConfig]] = KTOConfig
    method_class = KTOMethod
    takes_reference = True
