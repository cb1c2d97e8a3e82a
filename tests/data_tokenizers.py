"""Small tokenizers whose output can be checked by eye, for the tests of ``alignment.data``."""

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
    """A byte-level BPE of about 300 tokens trained on a few lines, with ``<|endoftext|>`` as EOS, no BOS, no pad."""
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
