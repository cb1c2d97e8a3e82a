"""The methods by name. A new method adds its options class here."""

from __future__ import annotations

import dataclasses

from alignment.config.cpo import CPOConfig
from alignment.config.kto import KTOConfig
from alignment.config.online_dpo import OnlineDPOConfig
from alignment.config.options import AlignmentConfig
from alignment.config.reward import RewardConfig
from alignment.config.sft import SFTConfig

METHODS: dict[str, type[AlignmentConfig]] = {
    "kto": KTOConfig,
    "cpo": CPOConfig,
    "online_dpo": OnlineDPOConfig,
    "reward": RewardConfig,
    "sft": SFTConfig,
}


def option_names(cls: type[AlignmentConfig]) -> set[str]:
    """The names of all options of one method."""
    return {field.name for field in dataclasses.fields(cls)}
