"""The options of Online DPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.config import checks
from alignment.config.compatibility.trl import OnlineDPOCompatibility
from alignment.config.errors import OptionError, setting
from alignment.config.fields import Numbers, option
from alignment.config.options_online import OnlineOptions
from alignment.config.registry import Paper
from alignment.methods.losses import listed, papers
from alignment.objectives import dpo
from alignment.objectives.table import Loss


@dataclass(kw_only=True)
class OnlineDPOConfig(OnlineOptions, OnlineDPOCompatibility):
    """Options of Online DPO, on pairs of the policy's own completions (https://arxiv.org/abs/2402.04792).

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "Online DPO"
    method: ClassVar[str] = "online_dpo"
    LOSSES: ClassVar[Mapping[str, Loss]] = dpo.ONLINE_LOSSES
    PAPERS: ClassVar[Mapping[str, Paper]] = papers(
        LOSSES,
        "Direct Language Model Alignment from Online AI Feedback",
        "https://arxiv.org/abs/2402.04792",
    )
    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {**OnlineOptions.TRL_DEFAULTS, "ds3_gather_for_generation": "true"}

    learning_rate: float = option(5e-7, "Peak learning rate.")
    loss_type: str = option("sigmoid", f"Loss: {listed(LOSSES)}.", choices=tuple(LOSSES))
    beta: Numbers = option(
        0.1,
        "Strength of the regularization toward the reference, or a list with a value per epoch, of which the last "
        "applies to all further epochs.",
        several=True,
    )
    max_windows_without_pairs: int | None = option(
        20,
        "Stop the run after this number of windows in a row without a pair to train on, from which the model learns "
        "nothing. `null`: never.",
    )

    def resolve(self) -> None:
        """Check the options of Online DPO."""
        self.check_online()
        checks.at_least(self, 1, "max_windows_without_pairs")
        if not self.betas or not all(beta > 0 for beta in self.betas):
            raise OptionError(f"{setting('beta', self.beta)}: must be greater than 0")
        checks.need_reference(self, "Online DPO", known_rows=False)
        checks.refuse_labels(self, "Online DPO")

    @property
    def betas(self) -> tuple[float, ...]:
        """The beta of each epoch; the last value applies to all further epochs."""
        return tuple(self.beta) if isinstance(self.beta, list) else (self.beta,)
