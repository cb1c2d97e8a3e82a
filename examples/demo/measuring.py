"""Sample from a saved model, and score responses with the saved reward model.

Both are loaded from their folders by transformers, so that the saved files are tested.
the folders hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

from alignment.engines.collectives import device
from examples.demo.data import Row, assistant_turn, user_turn
from examples.demo.folder import Settings
from examples.demo.grammar import Request

_BATCH = 64


def sample(folder: Path, requests: Sequence[Request], settings: Settings, progress: bool) -> list[str]:
    """Sample at ``settings.temperature`` without truncation, deterministically for a seed."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device()).eval()
    set_seed(settings.seed)
    texts: list[str] = []
    starts = range(0, len(requests), _BATCH)
    for first in tqdm(starts, desc="sampling", disable=not progress, leave=False, dynamic_ncols=True):
        turns = [user_turn(request) for request in requests[first : first + _BATCH]]
        prompts = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        ids = model.generate(
            **prompts,
            do_sample=True,
            temperature=settings.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        texts += tokenizer.batch_decode(ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def rewards(folder: Path, requests: Sequence[Request], texts: Sequence[str]) -> list[float]:
    """Return the scores of one response to each request."""
    return _scores(folder, [user_turn(r) + assistant_turn(text) for r, text in zip(requests, texts, strict=True)])


def accuracy(folder: Path, pairs: Sequence[Row]) -> float:
    """Return the share of ``prompt, chosen, rejected`` rows whose chosen response scores higher; ties do not count."""
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
