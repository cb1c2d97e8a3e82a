"""The methods: a file each, with its options beside it. Importing this package imports none of them."""

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
