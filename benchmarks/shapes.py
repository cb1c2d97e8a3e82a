"""Random models of a given shape, and rows whose tokens are known without running a tokenizer.

A word-level tokenizer maps ``w7`` to id 7 + 2 and back, so a row of text determines a row of ids, and two programs
that read the same text train on the same ids.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

_SPECIALS = ("<pad>", "</s>")


@dataclass(frozen=True)
class Shape:
    """The size of a model and of its rows.

    Attributes:
        family: ``llama`` or ``qwen2``.
        vocab: vocabulary size; embeddings are tied.
        hidden: width of the hidden states.
        inner: width of the MLP.
        layers: decoder layers.
        heads: attention heads.
        kv_heads: key and value heads.
        least: tokens of the shortest sequence: prompt, completion and EOS.
        most: tokens of the longest sequence.
        lengths: file in this folder with the lengths of rows of real data; if empty, lengths are random.
    """

    family: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    least: int
    most: int
    lengths: str = ""

    def config(self) -> PretrainedConfig:
        """Return the transformers configuration; its positions suffice for any mismatched prompt and completion."""
        kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[self.family]
        return kind(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=max(1024, 2 * self.most),  # 1024: `max_length` by default
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )

    def describe(self) -> str:
        """Describe the shape in one line."""
        return (
            f"{self.family}-shaped, hidden {self.hidden}, {self.layers} layers, V = {self.vocab} tied, "
            f"lengths {self.least}-{self.most}{f' of {self.lengths}' if self.lengths else ''}"
        )


# The shape of the comparison with TRL; fixed, so that results of different days can be compared.
SIDE_BY_SIDE = Shape("llama", 32000, 256, 1024, 4, 4, 4, 64, 512)
# Qwen2-0.5B with its own vocabulary.
HALF_BILLION = Shape("qwen2", 151936, 896, 4864, 24, 14, 2, 256, 1024)
# A shape that the head does not dominate, with the lengths of preference data.
LAYERS = Shape("qwen2", 32000, 512, 2048, 6, 8, 2, 64, 512, "preference_lengths.txt")
SHAPES = {"head": SIDE_BY_SIDE, "layers": LAYERS}
TINY = Shape("qwen2", 512, 32, 64, 2, 4, 2, 16, 64)


def write_model(folder: Path, shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> int:
    """Write a random model and its tokenizer in Hugging Face format; return the number of parameters."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    model.save_pretrained(folder)
    tokenizer(shape.vocab).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def write_reward_model(folder: Path, shape: Shape, seed: int = 1) -> None:
    """Write a random sequence classifier with one label and its tokenizer."""
    torch.manual_seed(seed)
    config = shape.config()
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer(shape.vocab).save_pretrained(folder)


def tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer for ``w0``, ``w1`` … separated by spaces; ids 0 and 1 are padding and end of text."""
    words = {word: number for number, word in enumerate([*_SPECIALS, *(f"w{i}" for i in range(vocab - 2))])}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")


def load_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """Load a folder's tokenizer as written; ``AutoTokenizer`` would use the class of the model's family."""
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded


def paired_rows(shape: Shape, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return pairs; if lengths are random, the prompt is a quarter to three quarters of the shorter sequence."""
    rng = random.Random(seed)
    known, rows = _known_lengths(shape, rng), []
    for _ in range(count):
        if shape.lengths:
            prompt, *words = next(known)
        else:
            lengths = [rng.randint(shape.least, shape.most) for _ in range(2)]
            prompt = _prompt_length(rng, min(lengths))
            words = [length - prompt - 1 for length in lengths]
        chosen, rejected = (_words(rng, shape.vocab, each) for each in words)
        rows.append({"prompt": _words(rng, shape.vocab, prompt), "chosen": chosen, "rejected": rejected})
    return rows


def unpaired_rows(shape: Shape, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return labeled completions, every second one desirable; those of a known pair follow each other."""
    rng = random.Random(seed)
    known, words, rows = _known_lengths(shape, rng), [0], []
    for number in range(count):
        if not shape.lengths:
            length = rng.randint(shape.least, shape.most)
            prompt = _prompt_length(rng, length)
            words = [length - prompt - 1]
        elif number % 2 == 0:
            prompt, *words = next(known)
        text, answer = (_words(rng, shape.vocab, each) for each in (prompt, words[number % len(words)]))
        rows.append({"prompt": text, "completion": answer, "label": number % 2 == 0})
    return rows


def prompt_rows(shape: Shape, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return prompts; if lengths are random, they leave an eighth of the longest sequence for a completion."""
    rng = random.Random(seed)
    known, longest = _known_lengths(shape, rng), shape.most - shape.most // 8
    lengths = (next(known)[0] if shape.lengths else rng.randint(shape.least, longest) for _ in range(count))
    return [{"prompt": _words(rng, shape.vocab, length)} for length in lengths]


def tokens_of(row: dict[str, Any], new_tokens: int) -> int:
    """Count a row's tokens including EOS; a prompt-only row counts as two completions of ``new_tokens``."""
    words = {key: len(row[key].split()) for key in ("prompt", "completion", "chosen", "rejected") if key in row}
    prompt = words.pop("prompt")
    return sum(prompt + answer for answer in [words[key] + 1 for key in words] or [new_tokens] * 2)


def _known_lengths(shape: Shape, rng: random.Random) -> Iterator[tuple[int, int, int]]:
    """Yield the words of a prompt and two completions, without EOS, of all rows in random order, again and again."""
    lines = Path(__file__).with_name(shape.lengths).read_text(encoding="utf-8").splitlines()
    rows = [tuple(map(int, line.split())) for line in lines if not line.startswith("#")]
    while True:
        yield from ((prompt, chosen - 1, rejected - 1) for prompt, chosen, rejected in rng.sample(rows, len(rows)))


def _prompt_length(rng: random.Random, length: int) -> int:
    return rng.randint(length // 4, 3 * length // 4)


def _words(rng: random.Random, vocab: int, count: int) -> str:
    # Each word has a leading space, so that prompt + completion is split where prompt and completion are.
    return "".join(f" w{rng.randrange(vocab - 2)}" for _ in range(count))
