"""Preference alignment of causal language models (KTO, CPO, Online DPO) on DeepSpeed engines.

The public names are loaded on first use: `from alignment import KTOConfig` imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from alignment.methods import METHODS

if TYPE_CHECKING:
    from alignment.engines.watch.stop import RunStopped
    from alignment.methods.cpo import CPOTrainer
    from alignment.methods.cpo_options import CPOConfig
    from alignment.methods.dpo import DPOTrainer
    from alignment.methods.dpo_options import DPOConfig
    from alignment.methods.kto import KTOTrainer
    from alignment.methods.kto_options import KTOConfig
    from alignment.methods.online_dpo import OnlineDPOTrainer
    from alignment.methods.online_dpo_options import OnlineDPOConfig
    from alignment.methods.reward import RewardTrainer
    from alignment.methods.reward_options import RewardConfig
    from alignment.methods.sft import SFTTrainer
    from alignment.methods.sft_options import SFTConfig
    from alignment.rewards.endpoint import EndpointJudge, OpenAIPairwiseJudge
    from alignment.rewards.hub_judges import HfPairwiseJudge, PairRMJudge
    from alignment.rewards.pairwise import (
        AllTrueJudge,
        BaseBinaryJudge,
        BaseJudge,
        BasePairwiseJudge,
        BaseRankJudge,
    )
    from alignment.training.sampling.callbacks import LogCompletionsCallback, WinRateCallback

__version__ = "0.1.0"

__all__ = [
    "AllTrueJudge",
    "BaseBinaryJudge",
    "BaseJudge",
    "BasePairwiseJudge",
    "BaseRankJudge",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "EndpointJudge",
    "HfPairwiseJudge",
    "KTOConfig",
    "KTOTrainer",
    "LogCompletionsCallback",
    "OnlineDPOConfig",
    "OnlineDPOTrainer",
    "OpenAIPairwiseJudge",
    "PairRMJudge",
    "RewardConfig",
    "RewardTrainer",
    "RunStopped",
    "SFTConfig",
    "SFTTrainer",
    "WinRateCallback",
    "__version__",
]

_PATHS = (path for entry in METHODS.entries.values() for path in (entry.options, entry.trainer))
_HOMES = {name: module for module, _, name in (path.partition(":") for path in _PATHS)}
_HOMES["RunStopped"] = "alignment.engines.watch.stop"
_JUDGES = ("AllTrueJudge", "BaseBinaryJudge", "BaseJudge", "BasePairwiseJudge", "BaseRankJudge")
_HOMES |= dict.fromkeys(_JUDGES, "alignment.rewards.pairwise")
_HOMES |= dict.fromkeys(("EndpointJudge", "OpenAIPairwiseJudge"), "alignment.rewards.endpoint")
_HOMES |= dict.fromkeys(("HfPairwiseJudge", "PairRMJudge"), "alignment.rewards.hub_judges")
_HOMES |= dict.fromkeys(("LogCompletionsCallback", "WinRateCallback"), "alignment.training.sampling.callbacks")


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it.

    Raises:
        AttributeError: `name` is not public here.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.endswith("Trainer"):
        from alignment.engines.start_up import import_libraries

        import_libraries()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
