"""The options of reward model training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from alignment.compat.trl.table import GivenCompletions
from alignment.config import checks
from alignment.config.errors import refuse
from alignment.config.fields import Count, Early, NotNegative, option
from alignment.config.options import AlignmentConfig
from alignment.config.options_data import SequenceOptions, TokenizerOptions
from alignment.config.registry import Paper


@dataclass(kw_only=True)
class RewardConfig(TokenizerOptions, SequenceOptions, GivenCompletions, AlignmentConfig):
    """Options of reward model training: a sequence classifier with one label and the Bradley-Terry loss on pairs.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or an invalid value.
    """

    TITLE: ClassVar[str] = "Reward model"
    method: ClassVar[str] = "reward"
    PAPERS: ClassVar[Mapping[str, Paper]] = {
        "": Paper("Rank Analysis of Incomplete Block Designs", "https://doi.org/10.2307/2334029"),
    }
    TRL_DEFAULTS: ClassVar[Mapping[str, str]] = {**AlignmentConfig.TRL_DEFAULTS, "learning_rate": "0.0001"}
    SHORTEN_PROMPTS: ClassVar[bool] = False

    learning_rate: Early[NotNegative] = option(1e-5, "Peak learning rate.")
    max_prompt_length: Count | None = option(
        None, "Maximum length of the prompt, in tokens. If unset, only `max_length` applies."
    )
    center_rewards_coefficient: NotNegative | None = option(
        None, "Weight of a loss term that centers the rewards of a pair at 0; 0.01 is common. If unset, not added."
    )

    def check(self) -> None:
        """Check the options of reward model training."""
        checks.check_lengths(self, rows_per_unit=2)
        if self.generate_during_eval:
            refuse(self, "generate_during_eval", "a reward model does not generate completions; remove it")
        checks.refuse_reference(self, "reward model training")
