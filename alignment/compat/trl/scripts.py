"""What scripts written for TRL import beside trainers and configurations: TRL's own, loaded when first used.

Its ``extract_prompt`` and ``unpair_preference_dataset`` are not among them: they cut words and drop answers.
The trainers need neither, and read every format as it is (``docs/guides/data.md``). Its callbacks are refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from alignment.config.errors import DataError, OptionError
from alignment.data.kinds.pairs import split_messages, split_texts

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


def extract_prompt(example: Mapping[str, Any]) -> dict[str, Any]:
    """Split the common prompt off ``chosen`` and ``rejected``, as the trainers do with rows without a prompt.

    Texts are split between words, conversations between messages. Neither completion becomes empty.

    Raises:
        DataError: the two are identical.
    """
    chosen, rejected = example["chosen"], example["rejected"]
    if chosen == rejected:
        raise DataError("chosen and rejected are identical; remove the row")
    split = split_texts if isinstance(chosen, str) else split_messages
    return dict(zip(("prompt", "chosen", "rejected"), split(chosen, rejected)))


def unpair_preference_dataset(dataset: Any, num_proc: int | None = None, desc: str | None = None) -> Any:
    """Convert a dataset (or splits) of pairs to rows with ``completion`` and ``label``.

    In each batch of 1000 rows, the chosen completions come before the rejected ones.
    """

    def unpaired(rows: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        chosen, rejected = rows["chosen"], rows["rejected"]
        others = {name: values * 2 for name, values in rows.items() if name not in ("chosen", "rejected")}
        labels = [True] * len(chosen) + [False] * len(rejected)
        return {**others, "completion": chosen + rejected, "label": labels}

    return dataset.map(unpaired, batched=True, remove_columns=["chosen", "rejected"], num_proc=num_proc, desc=desc)


class LogCompletionsCallback:
    """Not supported: ``generate_during_eval`` writes completions at each evaluation, on all ranks.

    Raises:
        OptionError: always.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise OptionError(
            f"{type(self).__name__}: not supported; set generate_during_eval, which writes completions to "
            "completions.jsonl at each evaluation; Online DPO logs completions, and with a judge eval_win_rate, itself"
        )


class WinRateCallback(LogCompletionsCallback):
    """Not supported either: it compares with completions sampled at the start, which a resumed run lacks."""
