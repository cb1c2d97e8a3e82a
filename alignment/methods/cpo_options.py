"""The options of CPO and its variants: SimPO, CPO-SimPO, AlphaPO, IPO and hinge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.config import checks
from alignment.config.compatibility.trl import CPOCompatibility
from alignment.config.errors import OptionError, setting
from alignment.config.fields import option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.config.registry import Paper

CPO_LOSS_TYPES = ("sigmoid", "hinge", "ipo", "simpo", "alphapo")
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

    loss_type: str = option(
        "sigmoid", "Loss: `sigmoid`, `hinge`, `ipo`, `simpo` or `alphapo`.", choices=CPO_LOSS_TYPES
    )
    beta: float = option(0.1, "Inverse temperature of the loss; tau for `ipo`.")
    label_smoothing: float = option(
        0.0, "Assumed probability that the labels of a pair are swapped by mistake. Not for `hinge` and `ipo`."
    )
    cpo_alpha: float | None = option(
        None, "Weight of the NLL of chosen completions. Defaults to 1.0, or to 0.0 for `alphapo`."
    )
    simpo_gamma: float | None = option(
        None, "Target reward margin of `simpo` and `alphapo`. Defaults to 0.5.", older=("gamma",)
    )
    gamma_beta_ratio: float | None = option(None, "Sets `simpo_gamma` to this ratio times `beta`.")
    alpha: float | None = option(
        None, "Shape parameter of the reward of `simpo` and `alphapo`. Defaults to 0.0, or to 0.25 for `alphapo`."
    )

    def resolve(self) -> None:
        """Check the options of CPO, and set ``alpha`` and ``cpo_alpha`` depending on the loss."""
        checks.check_lengths(self, rows_per_unit=2)
        checks.positive(self, "beta")
        self._read_ratio()
        checks.at_least(self, 0, "cpo_alpha", "simpo_gamma")
        checks.refuse_reference(self, "CPO")
        if not 0 <= self.label_smoothing < 0.5:
            raise OptionError(
                f"{setting('label_smoothing', self.label_smoothing)}: must be at least 0 and less than 0.5"
            )
        if self.label_smoothing and self.loss_type not in _SMOOTHED_LOSSES:
            raise self._without_effect("label_smoothing", _SMOOTHED_LOSSES)
        if self.simpo_gamma is None:
            self.simpo_gamma = _DEFAULT_GAMMA
        if self.simpo_gamma != _DEFAULT_GAMMA and self.loss_type not in _MARGIN_LOSSES:
            raise self._without_effect("simpo_gamma", _MARGIN_LOSSES)
        if self.alpha and self.loss_type not in _MARGIN_LOSSES:
            raise OptionError(
                f"{setting('alpha', self.alpha)}: requires length-normalized log-probs, which "
                f"{setting('loss_type', self.loss_type)} does not use; set loss_type to simpo or alphapo, or "
                "alpha to 0"
            )
        if self.alpha == 0 and self.loss_type == "alphapo":
            raise OptionError(
                "alpha=0.0 with loss_type='alphapo' is equivalent to simpo; set loss_type to simpo, or alpha to 0.25"
            )
        if self.alpha is None:
            self.alpha = _ALPHAPO_ALPHA if self.loss_type == "alphapo" else 0.0
        if self.cpo_alpha is None:
            self.cpo_alpha = 0.0 if self.loss_type == "alphapo" else 1.0

    def _read_ratio(self) -> None:
        if self.gamma_beta_ratio is None:
            return
        if self.loss_type not in _MARGIN_LOSSES:
            raise self._without_effect("gamma_beta_ratio", _MARGIN_LOSSES)
        if self.simpo_gamma not in (None, self.gamma_beta_ratio * self.beta):
            both = (
                f"{setting('gamma_beta_ratio', self.gamma_beta_ratio)} and {setting('simpo_gamma', self.simpo_gamma)}"
            )
            raise OptionError(f"{both} both set the margin; remove one of them")
        self.simpo_gamma = self.gamma_beta_ratio * self.beta

    def _without_effect(self, name: str, losses: tuple[str, ...]) -> OptionError:
        return OptionError(
            f"{setting(name, getattr(self, name))}: has no effect with {setting('loss_type', self.loss_type)}; "
            f"remove it, or set loss_type to one of {', '.join(losses)}"
        )
