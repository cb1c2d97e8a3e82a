"""Small tokenizers with human-readable output, for the tests of ``alignment.data``."""

from __future__ import annotations

import string
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = CHATML.replace(
    "{{ m['content'] }}<|im_end|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}",
)
TOOLS = (  # as in templates with tool calls: null content is rendered as nothing
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINK = (  # as in Qwen3: an empty think block, in the generation prompt only if thinking is disabled
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ENDED = CHATML.replace("{% endif %}", "{% else %}</s>{% endif %}")  # as in Phi-3: EOS ends the conversation
THINK_OPEN = CHATML.replace(
    "assistant\n{% endif", "assistant\n<think>\n{% endif"
)  # as in R1: only in the generation prompt
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nthe world<|im_end|>\n{% endif %}" + CHATML
TURNS = ("<|im_start|>", "<|im_end|>")


def char_tokenizer(
    merges: tuple[tuple[str, str], ...] = (("a", "b"),),
    before: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    bos: str | None = "<s>",
    eos: str | None = "</s>",
    template: str | None = None,
    special_turns: bool = True,
) -> Any:
    """One token per character, apart from ``merges``. ``before`` and ``after`` are added around a text by default."""
    names = ["<s>", "</s>", "[gMASK]"]
    tokens = [*names, *string.ascii_letters, *string.digits, *" \n.,:!?-_", *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, list(merges)))
    backend.add_special_tokens(names)
    backend.add_tokens([AddedToken(turn, special=special_turns, normalized=False) for turn in TURNS])
    backend.decoder = decoders.Fuse()
    if before or after:
        used = [(name, tokens.index(name)) for name in {*before, *after}]
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join([*before, "$A", *after]), special_tokens=used
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    if special_turns:
        tokenizer.add_special_tokens({"additional_special_tokens": list(TURNS)})
    tokenizer.chat_template = template
    return tokenizer


def byte_tokenizer(template: str | None = CHATML) -> Any:
    """A byte-level BPE tokenizer with about 300 tokens, ``<|endoftext|>`` as EOS, and neither BOS nor pad token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    lines = ["the cat sat on the mat", "what is the answer to the question", "user assistant system hello world"] * 4
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<|endoftext|>", *TURNS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(TURNS)})
    tokenizer.chat_template = template
    return tokenizer


def word_tokenizer(words: str, eos: str | None = "</s>", **special: str) -> Any:
    """One token per whitespace-separated word of ``words``."""
    names = ["[UNK]", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate([*names, *dict.fromkeys(words.split())])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(names)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, unk_token="[UNK]", **special)


def readable_tokenizer(template: str | None = None, bos: bool = False) -> Any:
    """A byte-level BPE tokenizer with one token for each of some words, ``</s>`` as EOS and, with ``bos``, ``<s>``."""
    lines = [
        "user assistant system tool what is the cat on mat say hello yes no and red world blue answer Human Assistant"
    ]
    words = [word for line in lines for word in line.split()]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", *TURNS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*words, *(f" {word}" for word in words)], trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>" if bos else None, eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(TURNS)})
    tokenizer.chat_template = template
    return tokenizer
