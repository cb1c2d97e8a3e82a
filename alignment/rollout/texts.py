"""Completions as texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def continuations(prompt: list[int], completions: Sequence[list[int]], tokenizer: Any) -> list[str]:
    """The text that each completion adds to the prompt's, without special tokens."""

    def decoded(sequences: Sequence[list[int]]) -> list[str]:
        # No clean-up: rewards see the text exactly as generated.
        texts = tokenizer.batch_decode(sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return list(texts)

    head, *wholes = decoded([prompt, *([*prompt, *ids] for ids in completions)])
    if all(whole.startswith(head) for whole in wholes):
        return [whole[len(head) :] for whole in wholes]
    return decoded(completions)  # a character is split between prompt and completion
