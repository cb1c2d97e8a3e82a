"""Small byte-level tokenizers with the special tokens and the chat template of a family."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tools.trl.hub import templates

VOCABULARY = 1000


@dataclass(frozen=True)
class Family:
    """The special tokens and the chat template of a family; None for what it lacks.

    ``eos`` ends a completion; ``starts`` says whether ``bos`` is added before every text.
    """

    eos: str
    pad: str | None = None
    bos: str | None = None
    template: str | None = None
    others: tuple[str, ...] = ()
    starts: bool = False


_CHATML = ("<|im_start|>", "<|im_end|>")
_LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")
FAMILIES: dict[str, Family] = {
    "qwen": Family("<|im_end|>", "<|endoftext|>", None, templates.CHATML, _CHATML),
    "qwen3": Family("<|im_end|>", "<|endoftext|>", None, templates.CHATML_MARKED, _CHATML),
    "llama3": Family("<|eot_id|>", None, "<|begin_of_text|>", templates.LLAMA3, _LLAMA3, starts=True),
    "mistral": Family("</s>", None, "<s>", templates.MISTRAL, ("<unk>",), starts=True),
    "neox": Family("<|endoftext|>", None, "<|endoftext|>"),
    "harmony": Family("<|return|>", "<|endoftext|>", "<|startoftext|>", templates.HARMONY, _HARMONY),
}


def train(family: Family, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer of the family on texts, deterministically."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*dict.fromkeys(filter(None, (family.pad, family.bos, family.eos, *family.others)))],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if family.starts and family.bos:
        bos = (family.bos, tokenizer.token_to_id(family.bos))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    named = {"eos_token": family.eos, "bos_token": family.bos, "pad_token": family.pad}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32768, **named)
    fast.chat_template = family.template
    return fast
