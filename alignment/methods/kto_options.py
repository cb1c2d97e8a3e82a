"""The options of KTO and APO-zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.compat.trl.table import KTOCompatibility
from alignment.config import checks
from alignment.config.errors import refuse
from alignment.config.fields import LossName, Positive, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.config.options_model import ReferenceOptions
from alignment.config.registry import Paper
from alignment.methods.losses import check_losses, listed, papers
from alignment.objectives import kto
from alignment.objectives.table import Loss


@dataclass(kw_only=True)
class KTOConfig(ReferenceOptions, SequenceOptions, KTOCompatibility, AlignmentConfig):
    """Options of Kahneman-Tversky optimization (https://arxiv.org/abs/2402.01306).

    APO-zero: https://arxiv.org/abs/2408.06266.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "KTO"
    method: ClassVar[str] = "kto"
    LOSSES: ClassVar[Mapping[str, Loss]] = kto.LOSSES
    PAPERS: ClassVar[Mapping[str, Paper]] = papers(
        LOSSES, "KTO: Model Alignment as Prospect Theoretic Optimization", "https://arxiv.org/abs/2402.01306"
    )
    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {
        **AlignmentConfig.TRL_DEFAULTS,
        "train_sampling_strategy": "sequential",
    }

    loss_type: LossName = option("kto", f"Loss: {listed(LOSSES)}.")
    beta: Positive = option(0.1, "Strength of the regularization toward the reference.")
    desirable_weight: float = option(1.0, "Loss weight of desirable rows.")
    undesirable_weight: float = option(1.0, "Loss weight of undesirable rows.")

    def resolve(self) -> None:
        """Translate ``precompute_ref_log_probs``."""
        checks.resolve_reference(self)

    def check(self) -> None:
        """Check the options of KTO."""
        checks.check_lengths(self, rows_per_unit=1)
        check_losses(self, (self.loss_type,))
        if self.desirable_weight == self.undesirable_weight == 0:
            refuse(self, "desirable_weight undesirable_weight", "the loss would always be 0; set one above 0")
        checks.need_reference(self, "KTO")
        if "kl" in self.LOSSES[self.loss_type].needs and self.window_size == 1:
            refuse(
                self, "gradient_accumulation_steps per_device_train_batch_size",
                "KTO needs at least two rows per step to estimate the KL; set gradient_accumulation_steps to 2 or "
                "more (16 recommended)",
            )  # fmt: skip
