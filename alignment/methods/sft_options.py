"""The options of supervised fine-tuning, the usual start of an alignment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alignment.config import checks
from alignment.config.compatibility.trl import SFTCompatibility
from alignment.config.fields import option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions


@dataclass(kw_only=True)
class SFTConfig(SequenceOptions, SFTCompatibility, AlignmentConfig):
    """Supervised fine-tuning on the tokens of given answers; prompts are context only.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or one that cannot be used.
    """

    TITLE: ClassVar[str] = "SFT"
    method: ClassVar[str] = "sft"

    learning_rate: float = option(2e-5, "Peak learning rate.")

    def resolve(self) -> None:
        """Check the lengths; there is no reference model."""
        checks.check_lengths(self, rows_per_unit=1)
        checks.refuse_reference(self, "SFT")
