"""The options of reward-model training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.config import checks
from alignment.config.compatibility.trl import RewardCompatibility
from alignment.config.errors import OptionError
from alignment.config.fields import option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions, TokenizerOptions
from alignment.config.registry import Paper


@dataclass(kw_only=True)
class RewardConfig(TokenizerOptions, SequenceOptions, RewardCompatibility, AlignmentConfig):
    """A sequence classifier with one label, trained on pairs by the Bradley-Terry model.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or one that cannot be used.
    """

    TITLE: ClassVar[str] = "Reward model"
    method: ClassVar[str] = "reward"
    PAPERS: ClassVar[Mapping[str, Paper]] = {
        "": Paper("Rank Analysis of Incomplete Block Designs", "https://doi.org/10.2307/2334029"),
    }
    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {**AlignmentConfig.TRL_DEFAULTS, "learning_rate": "0.0001"}

    learning_rate: float = option(1e-5, "Peak learning rate.")
    max_prompt_length: int | None = option(None, "Longest prompt, in tokens; unset: only `max_length` counts.")
    center_rewards_coefficient: float | None = option(
        None, "Weight of a term that keeps the mean of a pair's rewards at 0 (0.01 is usual); unset: none."
    )

    def resolve(self) -> None:
        """Check the lengths; there is no reference model."""
        checks.check_lengths(self, rows_per_unit=2)
        checks.at_least(self, 0, "center_rewards_coefficient")
        if self.generate_during_eval:
            raise OptionError("generate_during_eval=True: a reward model scores answers and writes none; leave it out")
        checks.refuse_reference(self, "reward-model training")
