"""The options of CPO and its variants: SimPO, CPO-SimPO, AlphaPO, IPO and hinge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Lt

from alignment.config import checks
from alignment.config.compatibility.trl import CPOCompatibility
from alignment.config.errors import refuse, setting
from alignment.config.fields import NotNegative, Positive, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.config.registry import Paper

_MARGIN_LOSSES = ("simpo", "alphapo")
_SMOOTHED_LOSSES = ("sigmoid", "simpo", "alphapo")
_ALPHAPO_ALPHA = 0.25
_DEFAULT_GAMMA = 0.5


@dataclass(kw_only=True)
class CPOConfig(SequenceOptions, CPOCompatibility, AlignmentConfig):
    """Options of contrastive preference optimization (https://arxiv.org/abs/2401.08417), without a reference model.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "CPO"
    method: ClassVar[str] = "cpo"
    PAPERS: ClassVar[Mapping[str, Paper]] = {
        "": Paper(
            "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
            "https://arxiv.org/abs/2401.08417",
        ),
        "hinge": Paper(
            "SLiC-HF: Sequence Likelihood Calibration with Human Feedback", "https://arxiv.org/abs/2305.10425"
        ),
        "ipo": Paper(
            "A General Theoretical Paradigm to Understand Learning from Human Preferences",
            "https://arxiv.org/abs/2310.12036",
        ),
        "simpo": Paper(
            "SimPO: Simple Preference Optimization with a Reference-Free Reward", "https://arxiv.org/abs/2405.14734"
        ),
        "alphapo": Paper("AlphaPO: Reward Shape Matters for LLM Alignment", "https://arxiv.org/abs/2501.03884"),
    }

    loss_type: Literal["sigmoid", "hinge", "ipo", "simpo", "alphapo"] = option(
        "sigmoid", "Loss: `sigmoid`, `hinge`, `ipo`, `simpo` or `alphapo`."
    )
    beta: Positive = option(0.1, "Inverse temperature of the loss; tau for `ipo`.")
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = option(
        0.0, "Assumed probability that the labels of a pair are swapped by mistake. Not for `hinge` and `ipo`."
    )
    cpo_alpha: NotNegative | None = option(
        None, "Weight of the NLL of chosen completions. Defaults to 1.0, or to 0.0 for `alphapo`."
    )
    simpo_gamma: NotNegative | None = option(
        None, "Target reward margin of `simpo` and `alphapo`. Defaults to 0.5.", older=("gamma",)
    )
    gamma_beta_ratio: float | None = option(None, "Sets `simpo_gamma` to this ratio times `beta`.")
    alpha: float | None = option(
        None, "Shape parameter of the reward of `simpo` and `alphapo`. Defaults to 0.0, or to 0.25 for `alphapo`."
    )

    def resolve(self) -> None:
        """Set ``simpo_gamma``, ``alpha`` and ``cpo_alpha`` depending on the loss."""
        if self.gamma_beta_ratio is not None:
            self._need("gamma_beta_ratio", _MARGIN_LOSSES)
            if self.simpo_gamma not in (None, self.gamma_beta_ratio * self.beta):
                refuse(self, "gamma_beta_ratio simpo_gamma", "both set the margin; remove one of them")
            self.simpo_gamma = self.gamma_beta_ratio * self.beta
        if self.simpo_gamma is None:
            self.simpo_gamma = _DEFAULT_GAMMA
        if self.alpha is None:
            self.alpha = _ALPHAPO_ALPHA if self.loss_type == "alphapo" else 0.0
        if self.cpo_alpha is None:
            self.cpo_alpha = 0.0 if self.loss_type == "alphapo" else 1.0

    def check(self) -> None:
        """Check the options of CPO."""
        checks.check_lengths(self, rows_per_unit=2)
        checks.refuse_reference(self, "CPO")
        if self.label_smoothing:
            self._need("label_smoothing", _SMOOTHED_LOSSES)
        if self.simpo_gamma != _DEFAULT_GAMMA:
            self._need("simpo_gamma", _MARGIN_LOSSES)
        if self.alpha:
            self._need("alpha", _MARGIN_LOSSES)
        if self.alpha == 0 and self.loss_type == "alphapo":
            refuse(self, "alpha loss_type", "equivalent to simpo; set loss_type to simpo, or alpha to 0.25")

    def _need(self, name: str, losses: tuple[str, ...]) -> None:
        """Require one of these losses, as an option has no effect with others."""
        if self.loss_type not in losses:
            loss = setting("loss_type", self.loss_type)
            refuse(self, name, f"has no effect with {loss}; remove it, or set loss_type to one of {', '.join(losses)}")
