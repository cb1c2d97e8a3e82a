"""The options of CPO and its variants: SimPO, CPO-SimPO, AlphaPO, IPO and hinge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.compat.trl.table import CPOCompatibility
from alignment.config import checks
from alignment.config.errors import refuse
from alignment.config.fields import LossName, NotNegative, Positive, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions
from alignment.config.registry import Paper
from alignment.methods.losses import check_formulas, check_losses, listed, papers, refuse_unread
from alignment.objectives import cpo
from alignment.objectives.table import Loss

_UNREAD = {"simpo_gamma": 0.5, "alpha": 0.0}  # defaults, also with losses that do not read them


@dataclass(kw_only=True)
class CPOConfig(SequenceOptions, CPOCompatibility, AlignmentConfig):
    """Options of contrastive preference optimization (https://arxiv.org/abs/2401.08417), without a reference model.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "CPO"
    method: ClassVar[str] = "cpo"
    LOSSES: ClassVar[Mapping[str, Loss]] = cpo.LOSSES
    PAPERS: ClassVar[Mapping[str, Paper]] = papers(
        LOSSES,
        "Contrastive Preference Optimization: Pushing the Boundaries of LLM Performance in Machine Translation",
        "https://arxiv.org/abs/2401.08417",
    )

    loss_type: LossName = option("sigmoid", f"Loss: {listed(LOSSES)}.")
    beta: Positive = option(0.1, "Inverse temperature of the loss; tau for `ipo`.")
    label_smoothing: float = option(
        0.0, "Assumed probability that the labels of a pair are swapped by mistake. Not for `hinge` and `ipo`."
    )
    cpo_alpha: NotNegative | None = option(
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
        """Set ``simpo_gamma``, ``alpha`` and ``cpo_alpha`` depending on the loss."""
        if self.gamma_beta_ratio is not None:
            margin = self.gamma_beta_ratio * self.beta
            if self.simpo_gamma not in (None, margin):
                refuse(self, "gamma_beta_ratio simpo_gamma", "both set the margin; remove one of them")
            self.simpo_gamma = margin
        for name, default in {**_UNREAD, "cpo_alpha": 1.0, **self.LOSSES[self.loss_type].defaults}.items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    def check(self) -> None:
        """Check the options of CPO."""
        checks.check_lengths(self, rows_per_unit=2)
        checks.refuse_reference(self, "CPO")
        if self.gamma_beta_ratio is not None and "simpo_gamma" not in self.LOSSES[self.loss_type].reads:
            refuse_unread(self, "gamma_beta_ratio", "simpo_gamma")
        check_losses(self, (self.loss_type,), **_UNREAD)
        check_formulas(self, (self.loss_type,))
