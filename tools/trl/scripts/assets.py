"""The assets of the scripts: tiny models of the same families, and rows with the same columns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from tools.trl.hub import models, rows
from tools.trl.hub.build import snapshot, write_rows
from tools.trl.hub.models import Tiny

_GPT2: dict[str, Any] = {"n_embd": 16, "n_head": 4, "n_layer": 2}
_QWEN: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
_WIDE: dict[str, Any] = {"hidden_size": 16}
MODELS = (
    Tiny("trl-lib/qwen1.5-1.8b-sft", "Qwen2ForCausalLM", "qwen", own=_QWEN),
    Tiny("gpt2", "GPT2LMHeadModel", "neox", own=_GPT2, sizes=False),  # its tokenizer has no chat template either
    Tiny("trl-lib/pythia-1b-deduped-tldr-sft", "GPTNeoXForCausalLM", "neox", own=_WIDE),
    Tiny(
        "trl-lib/pythia-1b-deduped-tldr-rm", "GPTNeoXForSequenceClassification", "neox", own={**_WIDE, "num_labels": 1}
    ),
    Tiny("Qwen/Qwen2-0.5B", "Qwen2ForCausalLM", "qwen", own=_QWEN),
    Tiny("Qwen/Qwen2-0.5B-Instruct", "Qwen2ForCausalLM", "qwen", own=_QWEN),
)
_TIMES = 6  # there are 19 statements


def prepare(folder: Path) -> Path:
    """Build the assets on first use, and return the value for ``HF_HOME``."""
    home = folder / "trl-scripts"
    if not home.exists():
        partial = folder / f"trl-scripts.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        texts = rows.texts()
        for tiny in MODELS:
            models.save(tiny, texts, snapshot(partial, tiny.name))
        for repository, columns in datasets().items():
            write_rows(partial, repository.lower(), "default", columns)  # the folder names of datasets
        partial.rename(home)
    return home


def datasets() -> dict[str, rows.Columns]:
    """Return rows by the name of the dataset with these columns."""
    chats, texts = rows.conversational(), rows.standard()
    pairs = chats["implicit_prompt_preference"]
    unpaired = {name: values * _TIMES for name, values in chats["unpaired_preference"].items()}
    scores = {"score_chosen": [8.0] * len(pairs["chosen"]), "score_rejected": [3.5] * len(pairs["chosen"])}
    turns = [first + second for first, second in zip(chats["language_modeling"]["messages"], pairs["chosen"])]
    return {
        "trl-lib/kto-mix-14k": unpaired,
        "trl-lib/ultrafeedback_binarized": {name: values * _TIMES for name, values in (pairs | scores).items()},
        "trl-lib/tldr": {name: values * _TIMES for name, values in texts["prompt_completion"].items()},
        "trl-lib/Capybara": {
            "source": ["Tiny"] * len(turns) * _TIMES,
            "messages": turns * _TIMES,
            "num_turns": [2] * len(turns) * _TIMES,
        },
    }
