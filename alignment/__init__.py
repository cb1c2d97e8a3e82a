"""Preference alignment of causal language models (KTO, CPO, Online DPO) on DeepSpeed engines.

The public names are loaded on first use: `from alignment import KTOConfig` imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alignment.config.cpo import CPOConfig
    from alignment.config.kto import KTOConfig
    from alignment.config.online_dpo import OnlineDPOConfig
    from alignment.config.reward import RewardConfig
    from alignment.config.sft import SFTConfig
    from alignment.trainers.cpo import CPOTrainer
    from alignment.trainers.kto import KTOTrainer
    from alignment.trainers.online_dpo import OnlineDPOTrainer
    from alignment.trainers.reward import RewardTrainer
    from alignment.trainers.sft import SFTTrainer

__version__ = "0.1.0"

__all__ = [
    "CPOConfig",
    "CPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "__version__",
]

_HOMES = {
    "CPOConfig": "alignment.config.cpo",
    "CPOTrainer": "alignment.trainers.cpo",
    "KTOConfig": "alignment.config.kto",
    "KTOTrainer": "alignment.trainers.kto",
    "OnlineDPOConfig": "alignment.config.online_dpo",
    "OnlineDPOTrainer": "alignment.trainers.online_dpo",
    "RewardConfig": "alignment.config.reward",
    "RewardTrainer": "alignment.trainers.reward",
    "SFTConfig": "alignment.config.sft",
    "SFTTrainer": "alignment.trainers.sft",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it.

    Raises:
        AttributeError: `name` is not public here.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
