"""The options of DPO on preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.config import checks
from alignment.config.compatibility.trl import DPOCompatibility
from alignment.config.errors import OptionError, did_you_mean, setting
from alignment.config.fields import Texts, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import TRUNCATION_MODES, SequenceOptions
from alignment.config.options_model import ReferenceOptions
from alignment.config.registry import Paper

DPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo")
# Further losses of TRL, which are not supported.
_ELSEWHERE = (
    "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
    "discopop", "sft", "sigmoid_norm",
)  # fmt: skip


@dataclass(kw_only=True)
class DPOConfig(ReferenceOptions, SequenceOptions, DPOCompatibility, AlignmentConfig):
    """Options of direct preference optimization (https://arxiv.org/abs/2305.18290).

    IPO: https://arxiv.org/abs/2310.12036.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "DPO"
    method: ClassVar[str] = "dpo"
    PAPERS: ClassVar[Mapping[str, Paper]] = {
        "": Paper(
            "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
            "https://arxiv.org/abs/2305.18290",
        ),
        "hinge": Paper(
            "SLiC-HF: Sequence Likelihood Calibration with Human Feedback", "https://arxiv.org/abs/2305.10425"
        ),
        "ipo": Paper(
            "A General Theoretical Paradigm to Understand Learning from Human Preferences",
            "https://arxiv.org/abs/2310.12036",
        ),
    }
    SHORTEN_PROMPTS: ClassVar[bool] = False

    max_prompt_length: int | None = option(
        None, "Maximum length of the prompt, in tokens. If unset, only `max_length` applies."
    )
    truncation_mode: str = option(
        "keep_start", "Which part of an overlong prompt to keep: `keep_end` or `keep_start`.", choices=TRUNCATION_MODES
    )
    loss_type: Texts = option(
        "sigmoid", "Loss: `sigmoid`, `hinge` or `ipo` (with log-probs averaged over tokens).", several=True
    )
    beta: float = option(0.1, "Strength of the regularization toward the reference; tau for `ipo`.")
    label_smoothing: float = option(
        0.0, "Assumed probability that the labels of a pair are swapped by mistake. For `sigmoid` only."
    )

    def resolve(self) -> None:
        """Check the options of DPO; a list with a single loss becomes that loss."""
        checks.check_lengths(self, rows_per_unit=2)
        checks.positive(self, "beta")
        checks.need_reference(self, "DPO")
        checks.refuse_labels(self, "DPO")
        self._check_loss()
        if not 0 <= self.label_smoothing < 0.5:
            raise OptionError(
                f"{setting('label_smoothing', self.label_smoothing)}: must be at least 0 and less than 0.5"
            )
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise OptionError(
                f"{setting('label_smoothing', self.label_smoothing)}: has no effect with "
                f"{setting('loss_type', self.loss_type)}; remove it, or set loss_type to sigmoid"
            )

    def _check_loss(self) -> None:
        given = setting("loss_type", self.loss_type)
        if isinstance(self.loss_type, list):
            if len(self.loss_type) != 1:
                raise OptionError(f"{given}: combining several losses is not supported; set one of them")
            (self.loss_type,) = self.loss_type
        if self.loss_type in _ELSEWHERE:
            raise OptionError(f"{given}: not supported; set one of {', '.join(DPO_LOSS_TYPES)}")
        if self.loss_type not in DPO_LOSS_TYPES:
            near = did_you_mean(str(self.loss_type), DPO_LOSS_TYPES)
            raise OptionError(f"{given}: unknown loss; set one of {', '.join(DPO_LOSS_TYPES)}{near}")
