"""Length limits: cutting prompts and completions to what the options allow, and saying what cannot be kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignment.config.errors import OptionError

EMPTY = "the completion is empty"
NO_ROOM = "no room for the completion (prompt fills max_length)"
NO_CONTEXT = "nothing before the completion (empty prompt, and the tokenizer has no BOS or EOS token)"
NO_START = "nothing to begin with (empty prompt, and the tokenizer has no BOS or EOS token)"
TRUNCATION_MODES = ("keep_end", "keep_start")


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens, None for no limit. ``truncation_mode`` says which end of a long prompt is kept.

    Raises:
        OptionError: a length below 1, or an unknown mode.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_end"

    def __post_init__(self) -> None:
        for key in ("max_length", "max_prompt_length", "max_completion_length"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{key}={value!r}: set a whole number of tokens of at least 1, or null for no limit")
        if self.truncation_mode not in TRUNCATION_MODES:
            raise OptionError(f"truncation_mode={self.truncation_mode!r}: set keep_end or keep_start")


@dataclass(frozen=True)
class Fitted:
    """One prompt and its completions within the limits.

    ``reasons[i]`` is None, or why completion i (then empty) cannot be used; ``cut[i]`` whether it lost tokens. Of a
    prompt without completions ``reasons[0]`` is None, or why the prompt cannot be used.
    """

    prompt: list[int]
    prompt_cut: bool
    completions: list[list[int]]
    cut: list[bool]
    reasons: list[str | None]


def fit(prompt: list[int], completions: Sequence[list[int]], limits: Limits, head: int, alone: bool = False) -> Fitted:
    """Cut a prompt, then each completion at its end, to the limits.

    Args:
        prompt: token ids; empty only where nothing can stand before the completion.
        completions: token ids of each completion.
        limits: the limits.
        head: how many leading prompt tokens (BOS) ``keep_end`` must preserve.
        alone: a completion may stand without a prompt.
    """
    kept = _cut_prompt(prompt, limits, head)
    room = len(max(completions, key=len, default=[])) if limits.max_length is None else limits.max_length - len(kept)
    most = room if limits.max_completion_length is None else min(room, limits.max_completion_length)
    fitted: list[list[int]] = []
    reasons: list[str | None] = []
    for completion in completions:
        reason = EMPTY if not completion else NO_CONTEXT if not (kept or alone) else NO_ROOM if room < 1 else None
        fitted.append([] if reason else completion[:most])
        reasons.append(reason)
    cut = [not reason and len(new) < len(old) for new, old, reason in zip(fitted, completions, reasons, strict=True)]
    return Fitted(kept, len(kept) < len(prompt), fitted, cut, reasons)


def fit_prompt(prompt: list[int], limits: Limits) -> Fitted:
    """A prompt without completions, which is never cut: the policy answers the whole of it, or the row is dropped."""
    most, reason = limits.max_prompt_length, None
    if not prompt:
        reason = NO_START
    elif most is not None and len(prompt) > most:
        reason = f"prompt longer than {most} token{'s' if most > 1 else ''}"
    return Fitted(prompt, False, [], [], [reason])


def _cut_prompt(prompt: list[int], limits: Limits, head: int) -> list[int]:
    most = limits.max_prompt_length
    if most is None or len(prompt) <= most:
        return prompt
    if limits.truncation_mode == "keep_start" or most <= head:
        return prompt[:most]
    return prompt[:head] + prompt[len(prompt) - (most - head) :]
