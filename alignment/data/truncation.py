"""Length limits: truncate prompts and completions, and give the reasons for rows that must be dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alignment.config.errors import OptionError

EMPTY = "the completion is empty"
NO_ROOM = "no space left for the completion (the prompt fills max_length)"
NO_CONTEXT = "no context before the completion (empty prompt, and the tokenizer has no BOS or EOS token)"
IDENTICAL = "chosen and rejected are identical"
CUT_ALIKE = "chosen and rejected are identical after truncation"
TRUNCATION_MODES = ("keep_end", "keep_start")
PROMPT_LENGTH = 512  # tokens of the prompt that are kept in a row longer than max_length


@dataclass(frozen=True)
class Limits:
    """Lengths in tokens, None for no limit. ``truncation_mode`` selects the end of a long prompt to keep.

    Without ``max_prompt_length``, ``shorten_prompts`` cuts the prompt of a row that is longer than ``max_length``: to
    512 tokens, or to half of ``max_length`` if that is 512 or less.

    Raises:
        OptionError: a length below 1, or an unknown mode.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_end"
    shorten_prompts: bool = False

    def __post_init__(self) -> None:
        for key in ("max_length", "max_prompt_length", "max_completion_length"):
            value = getattr(self, key)
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{key}={value!r}: expected an integer of at least 1, or null for no limit")
        if self.truncation_mode not in TRUNCATION_MODES:
            raise OptionError(f"truncation_mode={self.truncation_mode!r}: expected keep_end or keep_start")


@dataclass(frozen=True)
class Fitted:
    """A prompt and its completions, truncated to the limits.

    ``reasons[i]`` is None, or the reason why completion i cannot be used (it is then empty); ``cut[i]`` tells whether
    it was truncated.
    """

    prompt: list[int]
    prompt_cut: bool
    completions: list[list[int]]
    cut: list[bool]
    reasons: list[str | None]


def fit(prompt: list[int], completions: Sequence[list[int]], limits: Limits, head: int, alone: bool = False) -> Fitted:
    """Truncate a prompt, and then each completion at its end, to the limits.

    Args:
        prompt: token IDs; empty only if there is no context token.
        completions: token IDs of each completion.
        limits: the limits.
        head: number of leading prompt tokens (BOS) that ``keep_end`` must preserve.
        alone: whether completions are allowed without a prompt.
    """
    limited = [completion[: limits.max_completion_length] for completion in completions]
    longest = max(map(len, limited), default=0)
    kept = _cut_prompt(prompt, _prompt_limit(len(prompt) + longest, limits), limits.truncation_mode, head)
    room = longest if limits.max_length is None else limits.max_length - len(kept)
    fitted: list[list[int]] = []
    reasons: list[str | None] = []
    for completion in limited:
        reason = EMPTY if not completion else NO_CONTEXT if not (kept or alone) else NO_ROOM if room < 1 else None
        fitted.append([] if reason else completion[:room])
        reasons.append(reason)
    cut = [not reason and len(new) < len(old) for new, old, reason in zip(fitted, completions, reasons, strict=True)]
    return Fitted(kept, len(kept) < len(prompt), fitted, cut, reasons)


def _prompt_limit(row: int, limits: Limits) -> int | None:
    """Return the maximum length of the prompt of a row of ``row`` tokens."""
    most = limits.max_length
    if limits.max_prompt_length is not None or not limits.shorten_prompts or most is None or row <= most:
        return limits.max_prompt_length
    return PROMPT_LENGTH if most > PROMPT_LENGTH else most // 2


def _cut_prompt(prompt: list[int], most: int | None, mode: str, head: int) -> list[int]:
    if most is None or len(prompt) <= most:
        return prompt
    if mode == "keep_start" or most <= head:
        return prompt[:most]
    return prompt[:head] + prompt[len(prompt) - (most - head) :]
