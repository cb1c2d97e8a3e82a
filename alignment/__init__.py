"""Preference alignment of causal language models (KTO, CPO, Online DPO) on DeepSpeed engines.

The public names are loaded on first use: `from alignment import KTOConfig` imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from alignment.methods import METHODS

if TYPE_CHECKING:
    from alignment.compat.trl.scripts import (
        LogCompletionsCallback,
        WinRateCallback,
        extract_prompt,
        unpair_preference_dataset,
    )
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
    from alignment.rewards.llm_judge import (
        BasePairwiseJudge,
        HfPairwiseJudge,
        LLMJudge,
        OpenAIPairwiseJudge,
        PairRMJudge,
    )
    from alignment.run.stop import RunStopped

__version__ = "0.1.0"

__all__ = [
    "BasePairwiseJudge",
    "CPOConfig",
    "CPOTrainer",
    "DPOConfig",
    "DPOTrainer",
    "HfPairwiseJudge",
    "KTOConfig",
    "KTOTrainer",
    "LLMJudge",
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
    "extract_prompt",
    "unpair_preference_dataset",
    "__version__",
]

_PATHS = (path for paths in METHODS.entries.values() for path in paths)
_HOMES = {name: module for module, _, name in (path.partition(":") for path in _PATHS)}
_HOMES["RunStopped"] = "alignment.run.stop"
# What scripts written for TRL import besides.
_FOR_SCRIPTS = {
    "rewards.llm_judge": "BasePairwiseJudge HfPairwiseJudge LLMJudge OpenAIPairwiseJudge PairRMJudge",
    "compat.trl.scripts": "LogCompletionsCallback WinRateCallback extract_prompt unpair_preference_dataset",
}
_HOMES.update({name: f"alignment.{module}" for module, names in _FOR_SCRIPTS.items() for name in names.split()})


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it.

    Names of TRL that its scripts import are TRL's own (:mod:`alignment.compat.trl.scripts`).

    Raises:
        AttributeError: `name` is not public here.
        ImportError: it is a name of TRL, of which no supported release is installed.
    """
    if name not in _HOMES:
        from alignment.compat.trl.scripts import NAMES, of_trl

        if name in NAMES:
            return of_trl(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.endswith("Trainer"):
        from alignment.engines.start_up import import_libraries

        import_libraries()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
