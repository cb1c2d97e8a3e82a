"""The options of KTO and APO-zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from alignment.config import checks
from alignment.config.compatibility.trl import KTOCompatibility
from alignment.config.errors import refuse
from alignment.config.fields import NotNegative, Positive, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.config.options_model import ReferenceOptions
from alignment.config.registry import Paper


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

    loss_type: Literal["kto", "apo_zero_unpaired"] = option("kto", "Loss: `kto` or `apo_zero_unpaired`.")
    beta: Positive = option(0.1, "Strength of the regularization toward the reference.")
    desirable_weight: NotNegative = option(1.0, "Loss weight of desirable rows.")
    undesirable_weight: NotNegative = option(1.0, "Loss weight of undesirable rows.")

    def resolve(self) -> None:
        """Translate ``precompute_ref_log_probs``."""
        checks.resolve_reference(self)

    def check(self) -> None:
        """Check the options of KTO."""
        checks.check_lengths(self, rows_per_unit=1)
        if self.desirable_weight == self.undesirable_weight == 0:
            refuse(self, "desirable_weight undesirable_weight", "the loss would always be 0; set one above 0")
        checks.need_reference(self, "KTO")
        if self.loss_type == "kto" and self.window_size == 1:
            refuse(
                self, "gradient_accumulation_steps per_device_train_batch_size",
                "KTO needs at least two rows per step to estimate the KL; set gradient_accumulation_steps to 2 or "
                "more (16 recommended)",
            )  # fmt: skip
