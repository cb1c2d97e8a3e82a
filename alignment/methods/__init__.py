"""The built-in methods, one module each, with a module for its options. They are imported on first use."""

from __future__ import annotations

from alignment.config.registry import METHODS

for _name, _class in {
    "kto": "KTO",
    "cpo": "CPO",
    "online_dpo": "OnlineDPO",
    "dpo": "DPO",
    "reward": "Reward",
    "sft": "SFT",
}.items():
    METHODS.enter(_name, f"{__name__}.{_name}_options:{_class}Config", f"{__name__}.{_name}:{_class}Trainer")
