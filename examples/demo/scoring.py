"""What the reward model says of answers, from its saved folder: as a user would load it, and with his own code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from alignment.engines.collectives import device
from examples.demo.grammar import Request
from examples.demo.rows import Row, assistant_turn, user_turn

_BATCH = 64


def rewards(folder: Path, requests: Sequence[Request], texts: Sequence[str]) -> list[float]:
    """The score of one answer to each request."""
    return _scores(folder, [user_turn(r) + assistant_turn(text) for r, text in zip(requests, texts, strict=True)])


def accuracy(folder: Path, pairs: Sequence[Row]) -> float:
    """The share of ``prompt, chosen, rejected`` rows whose chosen answer has the higher score; a tie is none."""
    chosen = _scores(folder, [row["prompt"] + row["chosen"] for row in pairs])
    rejected = _scores(folder, [row["prompt"] + row["rejected"] for row in pairs])
    return sum(better > worse for better, worse in zip(chosen, rejected, strict=True)) / len(pairs)


@torch.inference_mode()
def _scores(folder: Path, conversations: Sequence[list[dict[str, str]]]) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).to(device()).eval()
    scores: list[float] = []
    for first in range(0, len(conversations), _BATCH):
        batch = tokenizer.apply_chat_template(
            list(conversations[first : first + _BATCH]), padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        scores += model(**batch).logits[:, 0].tolist()
    return scores
