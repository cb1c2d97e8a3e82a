"""The options of KTO and of APO-zero."""

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
    """Kahneman-Tversky optimisation: https://arxiv.org/abs/2402.01306; APO-zero: https://arxiv.org/abs/2408.06266.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or one that cannot be used.
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
    beta: float = option(0.1, "Strength of the pull towards the reference.")
    desirable_weight: float = option(1.0, "Weight of the loss of desirable rows.")
    undesirable_weight: float = option(1.0, "Weight of the loss of undesirable rows.")

    def resolve(self) -> None:
        """Check KTO's own options."""
        checks.check_lengths(self, rows_per_unit=1)
        checks.positive(self, "beta")
        checks.at_least(self, 0, "desirable_weight", "undesirable_weight")
        if self.desirable_weight == self.undesirable_weight == 0:
            raise OptionError("desirable_weight=0.0 and undesirable_weight=0.0: nothing to train; set one above 0")
        checks.need_reference(self, "KTO")
        if self.loss_type == "kto" and self.window_size == 1:
            raise OptionError(
                "gradient_accumulation_steps=1 with per_device_train_batch_size=1 on one process: KTO's KL needs at "
                "least two rows in a step; set gradient_accumulation_steps >= 2; 16 advised"
            )
