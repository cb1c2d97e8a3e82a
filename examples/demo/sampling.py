"""One sampled answer per request, from a saved folder: what is measured is what a user would load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from alignment.engines.collectives import device
from examples.demo.grammar import Request
from examples.demo.rows import user_turn
from examples.demo.settings import Settings

_BATCH = 64


def sample(folder: Path, requests: Sequence[Request], settings: Settings, progress: bool) -> list[str]:
    """Sample from the whole distribution at ``settings.temperature``; the seed decides the draws."""
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
