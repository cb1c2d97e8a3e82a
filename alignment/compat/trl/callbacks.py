"""Callbacks of TRL that scripts import. They are not supported; options do what they do."""

from __future__ import annotations

from typing import Any

from alignment.config.errors import OptionError


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
