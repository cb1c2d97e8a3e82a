"""Length limits: truncate prompts and completions, and give the reasons for rows that must be dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EMPTY = "the completion is empty"
NO_ROOM = "no space left for the completion (the prompt fills max_length)"
NO_CONTEXT = "no context before the completion (empty prompt, and the tokenizer has no BOS or EOS token)"
IDENTICAL = "chosen and rejected are identical"
CUT_ALIKE = "chosen and rejected are identical after truncation"
PROMPT_LENGTH = 512  # tokens of the prompt that are kept in a row longer than max_length


@dataclass(frozen=True)
class Limits:
    """Lengths of at least 1 token, None for no limit. ``truncation_mode`` selects the end of a long prompt to keep.

    Without ``max_prompt_length``, ``shorten_prompts`` cuts the prompt of a row that is longer than ``max_length``: to
    512 tokens, or to half of ``max_length`` if that is 512 or less.
    """

    max_length: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_end"
    shorten_prompts: bool = False


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
    longest, most, whole = max(map(len, limited), default=0), limits.max_prompt_length, limits.max_length
    if most is None and limits.shorten_prompts and whole is not None and len(prompt) + longest > whole:
        most = PROMPT_LENGTH if whole > PROMPT_LENGTH else whole // 2
    kept = prompt
    if most is not None and len(prompt) > most:
        if limits.truncation_mode == "keep_start" or most <= head:
            kept = prompt[:most]
        else:
            kept = prompt[:head] + prompt[len(prompt) - (most - head) :]
    room = longest if whole is None else whole - len(kept)
    fitted: list[list[int]] = []
    reasons: list[str | None] = []
    for completion in limited:
        reason = EMPTY if not completion else NO_CONTEXT if not (kept or alone) else NO_ROOM if room < 1 else None
        fitted.append([] if reason else completion[:room])
        reasons.append(reason)
    cut = [not reason and len(new) < len(old) for new, old, reason in zip(fitted, completions, reasons, strict=True)]
    return Fitted(kept, len(kept) < len(prompt), fitted, cut, reasons)
