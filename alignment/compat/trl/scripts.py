"""What scripts written for TRL import beside trainers and configurations: TRL's own, loaded when first used.

TRL's ``extract_prompt`` and ``unpair_preference_dataset`` are not among them: see :mod:`alignment.compat.trl.rows`.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

RELEASES = ">=0.24,<2"  # the extra `trl` in setup.py
_PLACES = ("trl", "trl.scripts.utils", "trl.trainer.utils")
NAMES = frozenset(
    """
    DatasetConfig DatasetMixtureConfig ModelConfig SIMPLE_CHAT_TEMPLATE ScriptArguments TrlParser apply_chat_template
    clone_chat_template get_dataset get_kbit_device_map get_peft_config get_quantization_config is_conversational
    maybe_apply_chat_template setup_chat_format
    """.split()
)


def of_trl(name: str) -> Any:
    """Return one of :data:`NAMES` from the installed release of TRL.

    Raises:
        ImportError: TRL is not installed, or a release that is not supported or lacks the name; names the releases.
    """
    try:
        found = version("trl")
    except PackageNotFoundError:
        found = ""
    if not found or not (0, 24) <= tuple(map(int, found.split(".")[:2])) < (2,):
        there = f"trl {found} is installed" if found else "it is not installed"
        raise ImportError(
            f"alignment.{name}: requires trl{RELEASES}, and {there}; run pip install 'deepspeed-alignment[trl]'"
        )
    for place in _PLACES:
        value = getattr(importlib.import_module(place), name, None)
        if value is not None:
            return value
    raise ImportError(f"alignment.{name}: trl {found} has no such name; install a release of trl{RELEASES} with it")
