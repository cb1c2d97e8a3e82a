"""The options of KTO and APO-zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.config import checks
from alignment.config.compatibility.trl import KTOCompatibility
from alignment.config.errors import OptionError
from alignment.config.fields import option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.config.options_model import ReferenceOptions
from alignment.config.registry import Paper

KTO_LOSS_TYPES = ("kto", "apo_zero_unpaired")


@dataclass(kw_only=True)
class KTOConfig(ReferenceOptions, SequenceOptions, KTOCompatibility, AlignmentConfig):
    """Options of Kahneman-Tversky optimization (https://arxiv.org/abs/2402.01306).

    APO-zero: https://arxiv.org/abs/2408.06266.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "KTO"
    method: ClassVar[str] = "kto"
    PAPERS: ClassVar[Mapping[str, Paper]] = {
        "": Paper("KTO: Model Alignment as Prospect Theoretic Optimization", "https://arxiv.org/abs/2402.01306"),
        "apo_zero_unpaired": Paper(
            "Anchored Preference Optimization and Contrastive Revisions: Addressing Underspecification in Alignment",
            "https://arxiv.org/abs/2408.06266",
        ),
    }
    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {
        **AlignmentConfig.TRL_DEFAULTS,
        "train_sampling_strategy": "sequential",
    }

    loss_type: str = option("kto", "Loss: `kto` or `apo_zero_unpaired`.", choices=KTO_LOSS_TYPES)
    beta: float = option(0.1, "Strength of the regularization toward the reference.")
    desirable_weight: float = option(1.0, "Loss weight of desirable rows.")
    undesirable_weight: float = option(1.0, "Loss weight of undesirable rows.")

    def resolve(self) -> None:
        """Check the options of KTO."""
        checks.check_lengths(self, rows_per_unit=1)
        checks.positive(self, "beta")
        checks.at_least(self, 0, "desirable_weight", "undesirable_weight")
        if self.desirable_weight == self.undesirable_weight == 0:
            raise OptionError(
                "desirable_weight=0.0 and undesirable_weight=0.0: the loss would always be 0; set one above 0"
            )
        checks.need_reference(self, "KTO")
        if self.loss_type == "kto" and self.window_size == 1:
            raise OptionError(
                "gradient_accumulation_steps=1 with per_device_train_batch_size=1 on one rank: KTO needs at least two "
                "rows per step to estimate the KL; set gradient_accumulation_steps to 2 or more (16 recommended)"
            )
