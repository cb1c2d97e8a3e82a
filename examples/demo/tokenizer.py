"""A byte-level BPE tokenizer with a chat template, trained on the demo's own text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import Qwen2Tokenizer

from examples.demo.rows import Row

END = "<|end|>"
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_VOCABULARY = 1024  # at most; the world has fewer words


def train_tokenizer(rows: Iterable[Row]) -> Any:
    """Train on the messages of ``rows``; the same rows give the same tokenizer, and ``AutoTokenizer`` the saved one.

    Its class is Qwen2's, because ``AutoTokenizer`` takes that for any folder with a Qwen2 model: with another one, a
    reloaded tokenizer would cut text differently and have a token more than the model.
    """
    texts = (message["content"] for row in rows for message in row["messages"])
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, _VOCABULARY, new_special_tokens=[END, *_ROLES], show_progress=False
    )
    tokenizer.add_special_tokens({"eos_token": END, "additional_special_tokens": list(_ROLES)})
    tokenizer.chat_template = TEMPLATE
    return tokenizer
