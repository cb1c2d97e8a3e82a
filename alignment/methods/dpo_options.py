"""The options of DPO on preference pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt

from alignment.config import checks
from alignment.config.compatibility.trl import DPOCompatibility
from alignment.config.errors import did_you_mean, refuse
from alignment.config.fields import Count, Positive, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions, Truncation
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

    max_prompt_length: Count | None = option(
        None, "Maximum length of the prompt, in tokens. If unset, only `max_length` applies."
    )
    truncation_mode: Truncation = option(
        "keep_start", "Which part of an overlong prompt to keep: `keep_end` or `keep_start`."
    )
    loss_type: list[str] | str | None = option(
        "sigmoid", "Loss: `sigmoid`, `hinge` or `ipo` (with log-probs averaged over tokens).", several=True
    )
    beta: Positive = option(0.1, "Strength of the regularization toward the reference; tau for `ipo`.")
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = option(
        0.0, "Assumed probability that the labels of a pair are swapped by mistake. For `sigmoid` only."
    )

    def resolve(self) -> None:
        """Translate ``precompute_ref_log_probs``; a list with a single loss becomes that loss."""
        checks.resolve_reference(self)
        if self.loss_type is None:
            self.loss_type = "sigmoid"
        if isinstance(self.loss_type, list):
            if len(self.loss_type) != 1:
                refuse(self, "loss_type", "combining several losses is not supported; set one of them")
            (self.loss_type,) = self.loss_type

    def check(self) -> None:
        """Check the options of DPO."""
        checks.check_lengths(self, rows_per_unit=2)
        checks.need_reference(self, "DPO")
        checks.refuse_labels(self, "DPO")
        if self.loss_type in _ELSEWHERE:
            refuse(self, "loss_type", f"not supported; set one of {', '.join(DPO_LOSS_TYPES)}")
        if self.loss_type not in DPO_LOSS_TYPES:
            near = did_you_mean(str(self.loss_type), DPO_LOSS_TYPES)
            refuse(self, "loss_type", f"unknown loss; set one of {', '.join(DPO_LOSS_TYPES)}{near}")
        if self.label_smoothing and self.loss_type != "sigmoid":
            refuse(self, "label_smoothing loss_type", "label smoothing is for loss_type: sigmoid only; remove it")
