"""The options of Online DPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from alignment.compat.trl.table import OnlineDPOCompatibility
from alignment.config import checks
from alignment.config.errors import refuse
from alignment.config.fields import Count, Early, Free, LossName, NotNegative, OrList, option
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

    learning_rate: Early[NotNegative] = option(5e-7, "Peak learning rate.")
    loss_type: LossName = option("sigmoid", f"Loss: {listed(LOSSES)}.")
    beta: Annotated[float, Gt(0), OrList] = option(
        0.1,
        "Strength of the regularization toward the reference, or a list with a value per epoch, of which the last "
        "applies to all further epochs.",
        several=True,
    )
    max_windows_without_pairs: Free[Count | None] = option(
        20,
        "Stop the run after this number of windows in a row without a pair to train on, from which the model learns "
        "nothing. `null`: never.",
    )

    def check(self) -> None:
        """Check the options of Online DPO."""
        super().check()
        if not self.betas:
            refuse(self, "beta", "cannot be empty; set a number")
        checks.need_reference(self, "Online DPO", known_rows=False)
        checks.refuse_labels(self, "Online DPO")

    @property
    def betas(self) -> tuple[float, ...]:
        """The beta of each epoch; the last value applies to all further epochs."""
        beta: Any = self.beta
        return tuple(beta) if isinstance(beta, list) else (beta,)
