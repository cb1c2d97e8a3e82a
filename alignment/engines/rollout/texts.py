"""Completions as texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def continuations(prompt: list[int], completions: Sequence[list[int]], tokenizer: Any) -> list[str]:
    """What the completions add to the prompt's text, without special tokens."""

    def decoded(sequences: Sequence[list[int]]) -> list[str]:
        # Nothing is tidied up: rewards see what was written.
        texts = tokenizer.batch_decode(sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return list(texts)

    head, *wholes = decoded([prompt, *([*prompt, *ids] for ids in completions)])
    if all(whole.startswith(head) for whole in wholes):
        return [whole[len(head) :] for whole in wholes]
    return decoded(completions)  # a character that is divided between the two
