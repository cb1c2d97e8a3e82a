"""ORPO, a method defined outside the package: https://arxiv.org/abs/2403.07691.

Supervised fine-tuning on the chosen completions with a penalty on the odds of the rejected ones, in one forward pass:

    deepspeed launch/train.py --method examples/orpo.py:ORPOTrainer --model_name_or_path MODEL \\
        --dataset_name pairs.jsonl --output_dir out/orpo --beta 0.1

From Python, ``ORPOTrainer(model, args=ORPOConfig("out"), train_dataset=rows).train()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from alignment.config import checks
from alignment.config.fields import Positive, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.data.batching import Batch
from alignment.data.kinds.pairs import PAIRS, PreferenceBatch
from alignment.engines.scoring import SequenceOutput
from alignment.objectives.likelihood import nll
from alignment.reporting.metrics import REWARDS, add_rewards, add_sides, sides
from alignment.training.method import Method, RowLosses, Window
from alignment.training.trainer import AlignmentTrainer


@dataclass(kw_only=True)
class ORPOConfig(SequenceOptions, AlignmentConfig):
    """The options of ORPO."""

    TITLE: ClassVar[str] = "ORPO"
    method: ClassVar[str] = "orpo"

    learning_rate: float = option(8e-6, "Peak learning rate.")
    beta: Positive = option(
        0.1, "Weight of the odds ratio relative to the likelihood of the chosen completions (lambda)."
    )

    def check(self) -> None:
        """Check the lengths; there is no reference model."""
        checks.check_lengths(self, rows_per_unit=2)
        checks.refuse_reference(self, "ORPO")


def log_odds(mean_logps: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` of the length-normalized likelihood p, from log p (any shape, below 0)."""
    return mean_logps - torch.log(-torch.expm1(mean_logps))


def odds_ratio_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the negative log-sigmoid of the log odds ratio, from mean log-probs of the completions, (P,) each."""
    return -F.logsigmoid(log_odds(chosen) - log_odds(rejected))


class ORPOMethod(Method[PreferenceBatch]):
    """One forward pass scores both completions of every pair."""

    kind = PAIRS
    metrics = (*REWARDS, *sides("logps"), "nll_loss", "log_odds_ratio")
    options: ORPOConfig

    def scored(self, batch: PreferenceBatch) -> Batch:
        return batch.pairs

    def losses(
        self, batch: PreferenceBatch, index: int, output: SequenceOutput, known: Any, window: Window[PreferenceBatch]
    ) -> RowLosses:
        pairs, beta, sums = len(batch.rows), self.options.beta, window.sums
        lengths = batch.pairs.lengths.to(output.scores.device)
        means = output.scores / lengths
        losses = odds_ratio_loss(means[:pairs], means[pairs:])
        likelihood, tokens = nll(output.scores[:pairs], lengths[:pairs])
        rewards = beta * means.detach()
        add_rewards(sums, rewards[:pairs], rewards[pairs:])
        add_sides(sums, "logps", means)
        sums.add("nll_loss", likelihood, tokens)
        sums.add("log_odds_ratio", (log_odds(means[:pairs]) - log_odds(means[pairs:])).sum(), pairs)
        # Sums over the counts of the whole window: any split into micro-batches and ranks gives the same update.
        local = likelihood / window.counts.first_completion_tokens + beta * losses.sum() / window.counts.rows
        return RowLosses(local, losses.detach())


class ORPOTrainer(AlignmentTrainer):
    """Trains with ORPO on ``chosen, rejected`` pairs, with or without a prompt."""

    config_class: ClassVar[type[ORPOConfig]] = ORPOConfig
    method_class = ORPOMethod
