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
from alignment.methods.losses import check_losses, listed, papers, without_effect
from alignment.objectives import cpo
from alignment.objectives.table import Loss

_UNREAD = {"simpo_gamma": 0.5, "alpha": 0.0}


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

    loss_type: str = option("sigmoid", f"Loss: {listed(LOSSES)}.", choices=tuple(LOSSES))
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
        """Check the options of CPO, and set those whose defaults depend on the loss."""
        checks.check_lengths(self, rows_per_unit=2)
        checks.positive(self, "beta")
        checks.at_least(self, 0, "cpo_alpha")
        checks.refuse_reference(self, "CPO")
        self._read_ratio()
        check_losses(self, (self.loss_type,), **_UNREAD)
        for name, default in {**_UNREAD, "cpo_alpha": 1.0, **self.LOSSES[self.loss_type].defaults}.items():
            if getattr(self, name) is None:
                setattr(self, name, default)

    def _read_ratio(self) -> None:
        if self.gamma_beta_ratio is None:
            return
        if "simpo_gamma" not in self.LOSSES[self.loss_type].reads:
            raise without_effect(self, "gamma_beta_ratio", "simpo_gamma")
        margin = self.gamma_beta_ratio * self.beta
        if self.simpo_gamma not in (None, margin):
            both = " and ".join(setting(name, getattr(self, name)) for name in ("gamma_beta_ratio", "simpo_gamma"))
            raise OptionError(f"{both} both set the margin; remove one of them")
        self.simpo_gamma = margin
